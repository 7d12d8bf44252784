package cli_test

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/cli"
	"github.com/harena-dev/harena/sdk/go/harena"
	"github.com/harena-dev/harena/sdk/go/harenatest"
)

var update = flag.Bool("update", false, "write the golden files anew")

type fixture struct {
	*harenatest.Server
	client  *harena.Client
	sandbox string
}

func start(t *testing.T) *fixture {
	t.Helper()
	s := harenatest.New()
	url, stop, err := s.Listen()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	c, err := harena.New(harena.WithURL(url), harena.WithToken(harenatest.Token))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	sb, err := c.CreateSandbox(t.Context(), harena.Spec{Image: "debian:12", Job: "j", Labels: map[string]string{"a": "b"}})
	if err != nil {
		t.Fatal(err)
	}
	return &fixture{s, c, sb.ID()}
}

type result struct {
	code           int
	stdout, stderr string
}

func (f *fixture) run(t *testing.T, stdin string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var out, errOut bytes.Buffer
	code := cli.Main(ctx, args, cli.Options{
		Version: "v0", Stdin: strings.NewReader(stdin), Stdout: &out, Stderr: &errOut,
		Client:   func(string) (*harena.Client, error) { return f.client, nil },
		Commands: []*cobra.Command{{Use: "extra", RunE: func(*cobra.Command, []string) error { return nil }}},
	})
	return result{code, out.String(), errOut.String()}
}

func TestExitStatus(t *testing.T) {
	f := start(t)
	for name, c := range map[string]struct {
		args           []string
		code           int
		stdout, stderr string
	}{
		"success":          {[]string{"exec", f.sandbox, "--", "both"}, 0, "out\n", "err\n"},
		"without dashes":   {[]string{"exec", f.sandbox, "echo", "-n", "x"}, 0, "-n x\n", ""},
		"status":           {[]string{"exec", f.sandbox, "--", "exit", "42"}, 42, "", ""},
		"signal":           {[]string{"exec", f.sandbox, "--", "kill", "15"}, 143, "", ""},
		"time-out":         {[]string{"exec", "--timeout", "1s", f.sandbox, "--", "timeout"}, 124, "partial\n", ""},
		"not found":        {[]string{"exec", f.sandbox, "--", "nope"}, 127, "", "harena: \"nope\" not found in PATH\n"},
		"run":              {[]string{"run", "--image", "debian:12", "--", "exit", "3"}, 3, "", ""},
		"run without dash": {[]string{"run", "--image", "debian:12", "echo", "--x"}, 0, "--x\n", ""},
		"run the image":    {[]string{"run", "--image", "debian:12"}, 5, "", ""},
		"missing image":    {[]string{"run", "--image", "missing", "--", "x"}, 125, "", "harena: there is no layer missing:latest (`harena layer import` makes one)\n"},
		"no image":         {[]string{"run", "--", "x"}, 125, "", "harena: no image was given (name a layer, such as --image debian:12; `harena layer ls` lists them)\n"},
		"no command":       {[]string{"exec", f.sandbox}, 125, "", "harena: no command was given (use harena exec [flags] SANDBOX -- CMD...)\n"},
		"late flag":        {[]string{"exec", f.sandbox, "--timeout", "1s", "x"}, 125, "", "harena: --timeout stands after the sandbox (put flags before the sandbox, or -- before the command)\n"},
		"no sandbox":       {[]string{"exec", "nope", "--", "x"}, 125, "", "harena: sandbox nope does not exist (look it up)\n"},
		"session":          {[]string{"exec", "--session", "s", f.sandbox, "--", "x"}, 125, "", "harena: sessions are not built yet (leave the session out)\n"},
		"size":             {[]string{"create", "--image", "x", "--memory", "lots"}, 125, "", "harena: invalid argument \"lots\" for \"--memory\" flag: \"lots\" is not a size; use a number of bytes, or with a unit such as 512m or 2GiB\n"},
		"number":           {[]string{"create", "--image", "x", "--cpu", "\x1b[31m"}, 125, "", "harena: invalid argument \"\\x1b[31m\" for \"--cpu\" flag: it is not a number, or too large\n"},
		"later":            {[]string{"verify", "x"}, 125, "", "harena: harena verify is not supported (verification is not built yet)\n"},
		"later, deep":      {[]string{"events", "verify", "--sandbox", "x"}, 125, "", "harena: harena events verify is not supported (hash-chained logs are not built yet)\n"},
		"stop":             {[]string{"stop", f.sandbox, "nope"}, 125, f.sandbox + "\n", "harena: sandbox nope does not exist\n"},
		"stop nothing":     {[]string{"stop"}, 125, "", "harena: no sandbox was selected (give IDs, --job or --label)\n"},
		"doctor":           {[]string{"doctor", "--edge", "leaky0"}, 1, "STATUS  CHECK        DETAIL\nok      cgroup       v2\nleaked  leak.mounts  1: /x (restart)\nnot clean: 0 failed, 1 leaked; 1 ok, 0 degraded, 0 unsupported, 0 unverified\n", ""},
		"damaged layer":    {[]string{"layer", "verify", "damaged"}, 125, "object 1 has another digest\n", ""},
		"bad source":       {[]string{"layer", "import", "--name", "x", "floppy:x"}, 125, "", "harena: the source floppy:x has none of the known forms (use dir:PATH, tar:PATH, oci:PATH, docker-archive:PATH, registry://REF or debootstrap:SUITE[:PKG,PKG])\n"},
		"cp on one side":   {[]string{"cp", "a", "b"}, 125, "", "harena: a and b are on the same side (write SANDBOX:PATH on exactly one side)\n"},
		"detached and -i":  {[]string{"exec", "-d", "-i", f.sandbox, "--", "x"}, 125, "", "harena: a detached command has no standard input (leave -i out)\n"},
		"record":           {[]string{"events", "--record", "f"}, 125, "", "harena: harena events --record is not supported (recording is not built yet; redirect `harena events --follow --json` to a file)\n"},
		"bad rule":         {[]string{"create", "--image", "x", "--net", "a:0"}, 125, "", "harena: --net a:0 is not a rule (use SERVICE, DOMAIN[:PORT] or CIDR[:PORT[/tcp or /udp]])\n"},
		"extra command":    {[]string{"extra"}, 0, "", ""},
		"net and deny-all": {[]string{"create", "--image", "x", "--net", "deny-all", "--net", "pypi"}, 125, "", "harena: --net deny-all excludes other rules (give either deny-all or what is allowed)\n"},
		"no such image":    {[]string{"layer", "import", "--name", "x", "oci:no-such:1"}, 125, "", "harena: cannot import oci:no-such:1: there is no such file (name an image that exists on this machine: oci:PATH)\n"},
	} {
		t.Run(name, func(t *testing.T) {
			f := f
			if name == "stop" { // the others need the sandbox
				f = start(t)
			}
			got := f.run(t, "", c.args...)
			if got.code != c.code || got.stdout != c.stdout {
				t.Errorf("%+v", got)
			}
			if c.stderr != "" && got.stderr != c.stderr {
				t.Errorf("stderr %q, want %q", got.stderr, c.stderr)
			}
			progress, message, ok := strings.Cut(got.stderr, "harena: ")
			if got.code == 125 && (!ok || progress != "" && progress != "verifying\n" || strings.Count(message, "\n") != 1) {
				t.Errorf("an error is not one line: %q", got.stderr)
			}
		})
	}
}

func TestUnknownCommandIsExplained(t *testing.T) {
	if got := start(t).run(t, "", "bogus"); got.code != 125 || !strings.Contains(got.stderr, "bogus") {
		t.Errorf("%+v", got)
	}
}

// volatile are the parts of an output that no two runs share.
var volatile = regexp.MustCompile(`("(create_ms|first_output_ms|total_ms)": )[0-9.]+|\b[0-9]+d\b`)

var padding = regexp.MustCompile(` {2,}`)

func TestGolden(t *testing.T) {
	for name, args := range map[string][]string{
		"run.json":           {"run", "--json", "--image", "debian:12", "--", "both"},
		"exec.json":          {"--json", "exec", "SANDBOX", "--", "bytes", "ff00c3a90a"},
		"create":             {"create", "--image", "debian:12", "--explain"},
		"create.json":        {"create", "--image", "debian:12", "--explain", "--json", "--label", "k=v", "--cpu", "0.5", "--memory", "512m", "--ttl", "1h", "--idle", "0", "--env", "A=b", "--net", "pypi", "--net", "*.example.org:443", "--net", "10.0.0.0/8:53/udp", "--toolkit", "a", "--toolkit", "b"},
		"ps":                 {"ps"},
		"ps.json":            {"ps", "--json"},
		"show":               {"show", "SANDBOX"},
		"stop.json":          {"stop", "--json", "--job", "j"},
		"commands":           {"commands", "SANDBOX"},
		"commands.json":      {"commands", "--json", "SANDBOX"},
		"detached.json":      {"exec", "-d", "--json", "SANDBOX", "--", "echo", "x"},
		"layer-ls":           {"layer", "ls"},
		"layer-ls.json":      {"layer", "ls", "--json"},
		"layer-show":         {"layer", "show", "debian:12"},
		"layer-import":       {"layer", "import", "--name", "new:1", "debootstrap:bookworm"},
		"layer-import.json":  {"layer", "import", "--json", "--name", "new:1", "--kind", "toolkit", "dir:testdata/tree"},
		"layer-verify":       {"layer", "verify", "debian:12"},
		"layer-verify.json":  {"layer", "verify", "debian:12", "--json"},
		"layer-gc":           {"layer", "gc", "--dry-run"},
		"layer-gc.json":      {"layer", "gc", "--json"},
		"events":             {"events"},
		"events.json":        {"events", "--json"},
		"events-follow.json": {"events", "--follow", "--json"},
		"fleet":              {"fleet", "ls"},
		"fleet.json":         {"fleet", "ls", "--json"},
		"drain":              {"fleet", "drain"},
		"doctor":             {"doctor"},
		"doctor.json":        {"doctor", "--json"},
		"version":            {"version"},
		"version.json":       {"version", "--json"},
		"help":               {"--help"},
		"help-run":           {"run", "--help"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("TZ", "UTC")
			f := start(t)
			if strings.HasPrefix(name, "commands") {
				f.run(t, "", "exec", f.sandbox, "--", "exit", "4")
			}
			for i, a := range args {
				args[i] = strings.ReplaceAll(a, "SANDBOX", f.sandbox)
			}
			got := f.run(t, "", args...)
			if got.code != 0 {
				t.Fatalf("%+v", got)
			}
			text := got.stdout
			if got.stderr != "" {
				text += "--- stderr\n" + got.stderr
			}
			text = volatile.ReplaceAllString(text, "${1}*")
			if !strings.HasSuffix(name, ".json") {
				text = padding.ReplaceAllString(text, "  ") // columns are as wide as the ages in them
			}
			path := filepath.Join("testdata", name+".golden")
			if *update {
				if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil || text != string(want) {
				t.Errorf("%v\n--- got\n%s--- want\n%s", err, text, want)
			}
			if strings.HasSuffix(name, ".json") && !json.Valid([]byte(got.stdout)) {
				t.Errorf("not JSON: %s", got.stdout)
			}
		})
	}
}

func TestRunCleansUp(t *testing.T) {
	f := start(t)
	before := f.Live()
	for _, args := range [][]string{{"exit", "1"}, {"nope"}, {"both"}} {
		f.run(t, "", append([]string{"run", "--image", "debian:12", "--"}, args...)...)
	}
	if f.Live() != before {
		t.Errorf("%d sandboxes live on", f.Live()-before)
	}
	// It would also have stopped without us: it is on a lease.
	if sb := f.Sandbox(harenatest.Edge + "00000000000002"); sb.GetSpec().GetLifetime().GetLease().AsDuration() != 20*time.Second {
		t.Errorf("lease: %v", sb.GetSpec().GetLifetime())
	}
}

func TestInput(t *testing.T) {
	f := start(t)
	if got := f.run(t, "a\x00b\nno end", "exec", "-i", f.sandbox, "--", "cat"); got.stdout != "a\x00b\nno end" {
		t.Errorf("%+v", got)
	}
	if got := f.run(t, "ignored", "exec", f.sandbox, "--", "cat"); got.stdout != "" || got.code != 0 {
		t.Errorf("%+v", got)
	}
	id := strings.TrimSpace(f.run(t, "", "exec", "-d", f.sandbox, "--", "block").stdout)
	if got := f.run(t, "", "kill", f.sandbox, id, "-s", "INT"); got.code != 0 {
		t.Errorf("%+v", got)
	}
	if got := f.run(t, "", "attach", f.sandbox, id); got.code != 130 || got.stdout != "SIGINT\n" {
		t.Errorf("%+v", got)
	}
}

func TestOutputIsCappedInJSON(t *testing.T) {
	f := start(t)
	got := f.run(t, "", "exec", "--json", "--max-output", "1k", f.sandbox, "--", "spew", "5000")
	var r struct {
		Base64    []byte `json:"stdout_base64"`
		Truncated bool   `json:"truncated"`
	}
	if err := json.Unmarshal([]byte(got.stdout), &r); err != nil || len(r.Base64) != 1024 || !r.Truncated {
		t.Errorf("%v, %d bytes, truncated %v", err, len(r.Base64), r.Truncated)
	}
}

func TestCopy(t *testing.T) {
	f := start(t)
	dir := t.TempDir()
	must := func(args ...string) {
		t.Helper()
		if got := f.run(t, "", args...); got.code != 0 {
			t.Fatalf("%v: %+v", args, got)
		}
	}
	has := func(path, want string) {
		t.Helper()
		if b, ok := f.File(path); !ok || string(b) != want {
			t.Errorf("%s: %q, %v", path, b, ok)
		}
	}
	src := filepath.Join(dir, "src")
	if err := os.MkdirAll(filepath.Join(src, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(src, "sub", "f"), []byte("F"), 0o644); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(src, "sub", "f")
	must("cp", file, f.sandbox+":/d/copy")
	has("/d/copy", "F")
	must("cp", file, f.sandbox+":/d") // a directory now
	has("/d/f", "F")
	must("cp", file, f.sandbox+":/new/")
	has("/new/f", "F")
	must("cp", src, f.sandbox+":/tree")
	has("/tree/sub/f", "F")
	must("cp", src, f.sandbox+":/tree")
	has("/tree/src/sub/f", "F")
	must("cp", src+"/.", f.sandbox+":/d")
	has("/d/sub/f", "F")
	local := func(path string) {
		t.Helper()
		if b, err := os.ReadFile(filepath.Join(dir, path)); err != nil || string(b) != "F" {
			t.Errorf("%s: %q, %v", path, b, err)
		}
	}
	must("cp", f.sandbox+":/d/f", filepath.Join(dir, "one"))
	local("one")
	must("cp", f.sandbox+":/d/f", dir)
	local("f")
	must("cp", f.sandbox+":/tree", filepath.Join(dir, "back"))
	local("back/sub/f")
	must("cp", f.sandbox+":/tree", dir)
	local("tree/sub/f")
	must("cp", f.sandbox+":/tree/.", filepath.Join(dir, "back"))
	local("back/src/sub/f")
	for _, args := range [][]string{{f.sandbox + ":/none", dir}, {filepath.Join(dir, "none"), f.sandbox + ":/x"}, {file, f.sandbox + ":/readonly/x"}} {
		if got := f.run(t, "", "cp", args[0], args[1]); got.code != 125 {
			t.Errorf("%v: %+v", args, got)
		}
	}
}

func TestDoctorWithoutServer(t *testing.T) {
	down, err := harena.New(harena.WithURL("http://127.0.0.1:1"))
	if err != nil {
		t.Fatal(err)
	}
	var out, errOut bytes.Buffer
	code := cli.Main(t.Context(), []string{"doctor", "--data", "/some/dir"}, cli.Options{
		Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errOut, Client: func(string) (*harena.Client, error) { return down, nil },
		OfflineDoctor: func(_ context.Context, dir string) (*harenav1.DoctorResponse, error) {
			return &harenav1.DoctorResponse{Clean: true, Checks: []*harenav1.Check{{Name: dir, Status: "ok"}}}, nil
		},
	})
	if code != 0 || !strings.Contains(out.String(), "/some/dir") || !strings.Contains(errOut.String(), "no server answers") {
		t.Errorf("%d, %s, %s", code, out.String(), errOut.String())
	}
}
