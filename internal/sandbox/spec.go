package sandbox

import (
	"fmt"
	"math"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

// Defaults and bounds of a SandboxSpec.
const (
	DefaultCPU    = 2.0
	DefaultMemory = 2 << 30
	DefaultDisk   = 10 << 30
	DefaultPids   = 1024
	DefaultIdle   = 30 * time.Minute

	MinCPU    = 0.01
	MinMemory = 8 << 20 // below this a shell does not start reliably
	MinPids   = 4
	MaxLabels = 64
	// MaxCPU and MaxPids are the kernel's (NR_CPUS, PID_MAX_LIMIT): above them a limit cannot be set.
	MaxCPU  = 8192
	MaxPids = 4 << 20
	// MaxPath bounds names of directories and users; PATH_MAX.
	MaxPath = 4096
	// MaxLayers keeps the overlay below the kernel's limit of 500 lower layers
	// (OVL_MAX_STACK) with room for snapshots.
	MaxLayers = 64
	MaxEnv    = 128 << 10 // bytes of names and values together
)

// Backends that the API knows.
const (
	BackendContainer = "container"
	BackendMicroVM   = "microvm"
	BackendVM        = "vm"
)

// Normalize returns spec with every default filled in, or an error of kind
// invalid that names the field. It does not look layers up.
func Normalize(spec *harenav1.SandboxSpec) (*harenav1.SandboxSpec, error) {
	if spec.GetImage() == "" {
		return nil, errs.E(errs.Invalid, "no image was given").
			WithHint("name a base layer, such as debian:12; `harena layer ls` lists them")
	}
	s := proto.Clone(spec).(*harenav1.SandboxSpec)
	setDefault(&s.Backend, BackendContainer)
	setDefault(&s.Runtime, "native")
	setDefault(&s.Qos, "be")
	if s.Limits == nil {
		s.Limits = &harenav1.Limits{}
	}
	setDefault(&s.Limits.Cpu, DefaultCPU)
	setDefault(&s.Limits.Memory, DefaultMemory)
	setDefault(&s.Limits.Disk, DefaultDisk)
	setDefault(&s.Limits.Pids, DefaultPids)
	if s.Lifetime == nil {
		s.Lifetime = &harenav1.Lifetime{}
	}
	if s.Lifetime.Idle == nil {
		s.Lifetime.Idle = durationpb.New(DefaultIdle)
	}
	setDefault(&s.Lifetime.OnIdle, "stop")
	if s.Process == nil {
		s.Process = &harenav1.ProcessDefaults{}
	}
	if s.Network == nil {
		s.Network = &harenav1.NetworkPolicy{}
	}
	return s, validate(s)
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func validate(s *harenav1.SandboxSpec) error {
	checks := []error{
		oneOf("backend", s.Backend, BackendContainer, BackendMicroVM, BackendVM),
		oneOf("runtime", s.Runtime, "native", "gvisor"),
		oneOf("qos", s.Qos, "be", "ls"),
		oneOf("on_idle", s.Lifetime.OnIdle, "stop", "pause"),
		atLeast("limits.cpu", s.Limits.Cpu, MinCPU),
		atLeast("limits.memory", s.Limits.Memory, MinMemory),
		atLeast("limits.disk", s.Limits.Disk, 1<<20),
		atLeast("limits.pids", s.Limits.Pids, MinPids),
		atMost("limits.cpu", s.Limits.Cpu, MaxCPU),
		atMost("limits.pids", s.Limits.Pids, MaxPids),
		short("user", s.Process.User),
		short("cwd", s.Process.Cwd),
		positive("lifetime.ttl", s.Lifetime.Ttl, false),
		positive("lifetime.idle", s.Lifetime.Idle, true),
		positive("lifetime.lease", s.Lifetime.Lease, false),
		ValidateEnv(s.Process.Env),
		ValidateLabels(s.Labels),
	}
	for _, err := range checks {
		if err != nil {
			return err
		}
	}
	if n := 2 + len(s.Toolkits); n > MaxLayers {
		return errs.OverLimit(errs.Invalid, "layers of a sandbox", MaxLayers, n)
	}
	if cwd := s.Process.Cwd; cwd != "" && cwd[0] != '/' {
		return errs.E(errs.Invalid, "cwd %.80q is not an absolute path", cwd).WithHint("begin it with /")
	}
	if s.Job != "" {
		if err := ValidateJob(s.Job); err != nil {
			return err
		}
	}
	if s.Hostname != "" && !hostname(s.Hostname) {
		return errs.E(errs.Invalid, "hostname %.80q is not valid", s.Hostname).WithHint("use 1-63 letters, digits and inner hyphens")
	}
	return nil
}

func label(s string) bool { return len(s) >= 1 && len(s) <= 63 && consists(s, letter+digits+"._/-") }

func hostname(s string) bool {
	return len(s) >= 1 && len(s) <= 63 && consists(s, letter+digits+"-") && s[0] != '-' && s[len(s)-1] != '-'
}

// ValidateJob checks the name of a job.
func ValidateJob(name string) error {
	if !label(name) {
		return errs.E(errs.Invalid, "job %.80q is not a valid name", name).WithHint("use 1-63 characters of A-Za-z0-9._/-")
	}
	return nil
}

// ValidateLabels checks keys and values of labels.
func ValidateLabels(labels map[string]string) error {
	if len(labels) > MaxLabels {
		return errs.OverLimit(errs.Invalid, "labels of a sandbox", MaxLabels, len(labels))
	}
	for k, v := range labels {
		if !label(k) || v != "" && !label(v) {
			return errs.E(errs.Invalid, "label %.80q=%.80q is not valid", k, v).WithHint("keys and values are up to 63 characters of A-Za-z0-9._/-")
		}
	}
	return nil
}

// ValidateEnv checks names and sizes of environment variables.
func ValidateEnv(env map[string]string) error {
	size := 0
	for k, v := range env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return errs.E(errs.Invalid, "environment variable %.80q is not valid", k).WithHint("names have no = and nothing has a NUL byte")
		}
		size += len(k) + len(v) + 2
	}
	if size > MaxEnv {
		return errs.OverLimit(errs.Invalid, "bytes of environment", MaxEnv, size)
	}
	return nil
}

func oneOf(field, value string, allowed ...string) error {
	for _, a := range allowed {
		if value == a {
			return nil
		}
	}
	return errs.E(errs.Invalid, "%s %.40q is not known", field, value).WithHint("use one of %s", strings.Join(allowed, ", "))
}

func atLeast[T int64 | float64](field string, value T, least float64) error {
	f := float64(value)
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return errs.E(errs.Invalid, "%s of %v is not a number to count with", field, value).WithHint("use at least %v", fmtNumber(least))
	}
	if f < least {
		return errs.E(errs.Invalid, "%s of %v is too small", field, value).WithHint("use at least %v", fmtNumber(least))
	}
	return nil
}

func atMost[T int64 | float64](field string, value T, most T) error {
	if value > most {
		return errs.OverLimit(errs.Invalid, field, fmtNumber(float64(most)), value)
	}
	return nil
}

func short(field, value string) error {
	if len(value) > MaxPath {
		return errs.OverLimit(errs.Invalid, "bytes of "+field, MaxPath, len(value))
	}
	if strings.ContainsRune(value, 0) {
		return errs.E(errs.Invalid, "%s %.80q has a NUL byte", field, value)
	}
	return nil
}

func fmtNumber(f float64) string {
	if f == float64(int64(f)) {
		return fmt.Sprint(int64(f))
	}
	return fmt.Sprint(f)
}

func positive(field string, d *durationpb.Duration, zero bool) error {
	if d == nil {
		return nil
	}
	if err := d.CheckValid(); err != nil {
		return errs.E(errs.Invalid, "%s is not a valid duration: %w", field, err)
	}
	if v := d.AsDuration(); v < 0 || v == 0 && !zero {
		return errs.E(errs.Invalid, "%s of %v is not positive", field, v)
	}
	return nil
}
