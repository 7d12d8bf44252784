package vm

import (
	"fmt"
	"os"
	"regexp"
	"time"
)

// step is a shell command in the machine, run in a directory of the checkout.
type step struct {
	name, dir, script string
	limit             time.Duration // on a machine as fast as the node
}

// short says of which packages a part runs in the short form.
var suites = []struct {
	pkg   string
	limit time.Duration
	short string // regular expression of tests; "" for none
}{
	{"internal/cgroup", time.Minute, "."},
	{"internal/supervisor/launch", 2 * time.Minute, "^(TestNobodyIsTraceable|TestMountsShowNoPathOfTheNode|TestWritableLayer|TestMaskedAndReadOnly|TestChecks.*)$"},
	{"internal/supervisor/exec", 2 * time.Minute, ""},
	{"internal/supervisor/files", 2 * time.Minute, ""},
	{"internal/supervisor", time.Minute, ""},
	{"internal/edge/backend/container", 3 * time.Minute, ""},
	{"internal/edge/disk", time.Minute, "^TestQuotas$/^ext4$"},
	{"internal/edge/swap", 30 * time.Second, ""},
	{"internal/storage/layer", 3 * time.Minute, ""},
	{"internal/storage/erofs", 2 * time.Minute, ""},
	{"internal/storage/fuseblob", time.Minute, ""},
	{"internal/blobd", 2 * time.Minute, ""},
	{"test/scenario", 6 * time.Minute, "^(TestCreateGetListStop|TestStreamsAreKeptApart|TestTimeoutKillsTheWholeTree|TestTerminal|TestFileNames|TestSandboxesDoNotShare|TestLimitsAreSeenInside|TestPauseGivesMemoryBack|TestForksShareFilesAndNoIdentity)$"},
}

// tooSlow are tests that an emulated machine does not get through: a hog that thrashes at its limit (docs/second-kernel.md).
const tooSlow = "^TestMemoryHog$"

// kernelScript shows that the machine is what it is meant to be.
const kernelScript = `
uname -r
case $(uname -r) in 6.12.*) ;; *) echo "not the kernel that was to be tested"; exit 1 ;; esac
[ "$(cat /sys/module/apparmor/parameters/enabled)" = Y ] || { echo "AppArmor is not enabled"; exit 1; }
[ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ] || { echo "not cgroup v2 only"; exit 1; }
echo "LSMs: $(cat /sys/kernel/security/lsm); controllers: $(cat /sys/fs/cgroup/cgroup.controllers)"
free -m
`

// doctorScript starts a node, asks it how it is, uses it and ends it; then nothing is left.
const doctorScript = `
data=/var/tmp/doctor
bin/harena up --data $data --listen 127.0.0.1:7070 >/tmp/doctor.log 2>&1 &
trap 'bin/harena down --data $data >/dev/null 2>&1' EXIT
until grep -q ^ready /tmp/doctor.log; do kill -0 $! || { cat /tmp/doctor.log; exit 1; }; sleep 0.2; done
field() { sed -n "s/.*\"$1\": *\"\([^\"]*\)\".*/\1/p" $data/client.json; }
export HARENA_URL=$(field url) HARENA_TOKEN=$(field token)
mkdir -p /tmp/layer/bin /tmp/layer/etc
cp /bin/busybox /tmp/layer/bin/sh
bin/harena layer import --name small:1 dir:/tmp/layer
bin/harena run --image small:1 --memory 64m -- /bin/sh -c 'echo inside' | grep -x inside
bin/harena doctor
bin/harena down --data $data
! grep doctor /proc/self/mountinfo
`

func all(long bool) []step {
	steps := []step{
		{"kernel", ".", kernelScript, 20 * time.Second},
		{"doctor", ".", doctorScript, 40 * time.Second},
	}
	for _, s := range suites {
		run := "."
		if !long {
			run = s.short
		}
		if tests := os.Getenv("HARENA_VM_TESTS"); tests != "" {
			run = tests
		}
		if run == "" {
			continue
		}
		steps = append(steps, step{s.pkg, s.pkg, fmt.Sprintf("./tests -test.v $SHORT -test.timeout=$LIMIT -test.run='%s' -test.skip='%s'", run, tooSlow), s.limit})
	}
	return steps
}

// chosen returns the steps of a form that match a regular expression.
func chosen(long bool, pattern string) ([]step, error) {
	re, err := regexp.Compile(pattern)
	if err != nil {
		return nil, fmt.Errorf("HARENA_VM_RUN: %w", err)
	}
	if script := os.Getenv("HARENA_VM_SCRIPT"); script != "" {
		return []step{{"script", ".", script, time.Minute}}, nil
	}
	var out []step
	for _, s := range all(long) {
		if re.MatchString(s.name) {
			out = append(out, s)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("HARENA_VM_RUN=%s matches no step", pattern)
	}
	return out, nil
}
