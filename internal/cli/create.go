package cli

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/sdk/go/harena"
)

// createFlags are the flags of everything that creates sandboxes.
type createFlags struct {
	spec         harena.Spec
	memory, disk sizeValue
	ttl, idle    durationValue
	env, labels  pairsValue
	net          []string
	cpu, gpus    float64
}

func (f *createFlags) add(fs *pflag.FlagSet) {
	f.env.env = true
	fs.StringVar(&f.spec.Image, "image", "", "base layer or snapshot: `NAME`[:TAG] or digest")
	fs.StringVar(&f.spec.Workspace, "workspace", "", "layer laid over the image: `NAME`")
	fs.StringArrayVar(&f.spec.Toolkits, "toolkit", nil, "layer laid over the workspace: `NAME`; may be repeated, the last is uppermost")
	fs.StringVar(&f.spec.Backend, "backend", "", "container (default), microvm or vm")
	fs.StringVar(&f.spec.Runtime, "runtime", "", "native (default) or gvisor")
	fs.Float64Var(&f.cpu, "cpu", 0, "cores, such as 0.5 (default 2)")
	fs.Var(&f.memory, "memory", "bytes of memory, such as 512m or 2GiB (default 2GiB)")
	fs.Var(&f.disk, "disk", "bytes of the writable layer (default 10GiB)")
	fs.Int64Var(&f.spec.Pids, "pids", 0, "processes and threads (default 1024)")
	fs.Float64Var(&f.gpus, "gpus", 0, "GPUs")
	fs.StringVar(&f.spec.QoS, "qos", "", "be (best effort, default) or ls (latency sensitive)")
	fs.Var(&f.ttl, "ttl", "stop this long after creation (default never)")
	fs.Var(&f.idle, "idle", "idle time-out, 0 for none (default 30m)")
	fs.StringVar(&f.spec.OnIdle, "on-idle", "", "stop (default) or pause")
	fs.StringVarP(&f.spec.User, "user", "u", "", "user of commands, by name or ID, with an optional :group (default root)")
	fs.StringVarP(&f.spec.Cwd, "cwd", "w", "", "working directory of commands (default the user's home)")
	fs.VarP(&f.env, "env", "e", "environment of commands; may be repeated; K alone passes on the variable K")
	fs.VarP(&f.labels, "label", "l", "label; may be repeated")
	fs.StringVar(&f.spec.Job, "job", "", "the job that it belongs to")
	fs.StringVar(&f.spec.Hostname, "hostname", "", "host name inside")
	fs.StringArrayVar(&f.net, "net", nil, "deny-all (default), or what is allowed: SERVICE, DOMAIN[:PORT] or CIDR[:PORT[/PROTO]]; may be repeated")
	fs.StringVar(&f.spec.RequestID, "request-id", "", "repeating a request with the same ID returns the first one's result")
}

// toSpec returns what the flags ask for.
func (f *createFlags) toSpec() (harena.Spec, error) {
	s := f.spec
	if s.Image == "" {
		return s, invalid("name a layer, such as --image debian:12; `harena layer ls` lists them", "no image was given")
	}
	s.CPU, s.GPUs, s.Memory, s.Disk = f.cpu, f.gpus, int64(f.memory), int64(f.disk)
	s.Env, s.Labels, s.TTL = f.env.m, f.labels.m, f.ttl.d
	if f.idle.set {
		if s.Idle = f.idle.d; s.Idle == 0 {
			s.Idle = harena.Never
		}
	}
	var err error
	s.Network, err = parseNetwork(f.net)
	return s, err
}

// parseNetwork reads rules: SERVICE, DOMAIN[:PORT[/PROTO]], CIDR[:PORT[/PROTO]].
func parseNetwork(rules []string) (*harenav1.NetworkPolicy, error) {
	p := &harenav1.NetworkPolicy{}
	for _, r := range rules {
		if r == "deny-all" || r == "none" {
			if len(rules) > 1 {
				return nil, invalid("give either deny-all or what is allowed", "--net %s excludes other rules", r)
			}
			continue
		}
		rule, err := parseRule(r)
		if err != nil {
			return nil, err
		}
		p.Allow = append(p.Allow, rule)
	}
	return p, nil
}

func parseRule(s string) (*harenav1.NetworkRule, error) {
	rule := &harenav1.NetworkRule{}
	target := s
	if _, err := netip.ParsePrefix(s); err != nil {
		if i := strings.LastIndexByte(s, ':'); i >= 0 {
			port, proto, _ := strings.Cut(s[i+1:], "/")
			n, err := strconv.ParseUint(port, 10, 16)
			if err != nil || n == 0 || proto != "" && proto != "tcp" && proto != "udp" {
				return nil, invalid("use SERVICE, DOMAIN[:PORT] or CIDR[:PORT[/tcp or /udp]]", "--net %s is not a rule", s)
			}
			target, rule.Port, rule.Protocol = s[:i], uint32(n), proto
		}
	}
	_, perr := netip.ParsePrefix(target)
	switch addr, aerr := netip.ParseAddr(target); {
	case target == "":
		return nil, invalid("use SERVICE, DOMAIN[:PORT] or CIDR[:PORT[/PROTO]]", "--net %q is not a rule", s)
	case perr == nil:
		rule.Target = &harenav1.NetworkRule_Cidr{Cidr: target}
	case aerr == nil:
		rule.Target = &harenav1.NetworkRule_Cidr{Cidr: netip.PrefixFrom(addr, addr.BitLen()).String()}
	case strings.Contains(target, "."):
		rule.Target = &harenav1.NetworkRule_Domain{Domain: target}
	default:
		rule.Target = &harenav1.NetworkRule_Service{Service: target}
	}
	return rule, nil
}

func (a *app) createCommand() *cobra.Command {
	var f createFlags
	cmd := &cobra.Command{
		Use: "create --image NAME [flags]", Short: "Create a sandbox and print its ID",
		Args: exactly(0, "flags only"),
	}
	f.add(cmd.Flags())
	cmd.Flags().BoolVar(&f.spec.Explain, "explain", false, "print how it was decided, and how long each step took, on standard error")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		spec, err := f.toSpec()
		if err != nil {
			return err
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		sb, err := c.CreateSandbox(cmd.Context(), spec)
		if err != nil {
			return err
		}
		if a.json {
			return a.printCreated(sb)
		}
		if spec.Explain {
			for _, line := range sb.Explanation {
				fmt.Fprintln(a.Stderr, printable(line))
			}
			for _, t := range sb.Timings {
				fmt.Fprintf(a.Stderr, "time: %-20s %8.3f ms\n", t.GetStep(), float64(t.GetMicros())/1000)
			}
		}
		fmt.Fprintln(a.Stdout, sb.ID())
		return nil
	}
	return cmd
}

// printCreated prints the sandbox with two members more: timings and explanation.
func (a *app) printCreated(sb *harena.Sandbox) error {
	raw, err := rawJSON(&harenav1.CreateResponse{Sandbox: sb.Info(), Timings: sb.Timings, Explanation: sb.Explanation})
	if err != nil {
		return err
	}
	var whole struct {
		Sandbox              map[string]any `json:"sandbox"`
		Timings, Explanation any
	}
	if err := unmarshal(raw, &whole); err != nil {
		return err
	}
	whole.Sandbox["timings"], whole.Sandbox["explanation"] = whole.Timings, whole.Explanation
	return a.printJSON(whole.Sandbox)
}
