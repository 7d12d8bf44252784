package exec

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/supervisor/users"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

func TestPrograms(t *testing.T) {
	tests := []struct {
		name, search string
		want         []string
	}{
		{"/bin/ls", "/usr/bin", []string{"/bin/ls"}},
		{"./x", "/usr/bin", []string{"./x"}},
		{"ls", "/usr/bin:/bin", []string{"/usr/bin/ls", "/bin/ls"}},
		{"ls", "/bin/:/bin:rel:", []string{"/bin/ls", "rel/ls", "./ls"}},
		{"ls", ":/bin", []string{"./ls", "/bin/ls"}},
		{"ls", "", []string{"./ls"}},
		{"ls", strings.Repeat("x", 5000) + ":/bin", []string{"/bin/ls"}},
		{strings.Repeat("x", 5000), "/bin", []string{"./" + strings.Repeat("x", 5000)}},
	}
	for _, tt := range tests {
		if got := programs(tt.name, tt.search); !slices.Equal(got, tt.want) {
			t.Errorf("%.40q in %.40q: got %.80q", tt.name, tt.search, got)
		}
	}
	many := make([]string, 1000)
	for i := range many {
		many[i] = strings.Repeat("d", i+1)
	}
	if got := programs("ls", strings.Join(many, ":")); len(got) != maxProgram {
		t.Errorf("%d candidates", len(got))
	}
}

func TestPlan(t *testing.T) {
	root := users.User{Name: "root", Home: "/root"}
	tests := []struct {
		name   string
		cmd    *harenav1.Command
		user   users.User
		def    *harenav1.ProcessDefaults
		env    []string
		cwd    string
		orRoot bool
	}{
		{
			"Docker's defaults", shell("x"), root, nil,
			[]string{"HOME=/root", "HOSTNAME=box", "PATH=" + defaultPath, "USER=root"}, "/root", true,
		},
		{
			"a user that is only a number", shell("x"), users.User{UID: 7}, nil,
			[]string{"HOME=/", "HOSTNAME=box", "PATH=" + defaultPath}, "/", false,
		},
		{
			"the sandbox's, then the command's", &harenav1.Command{Shell: "x", Env: map[string]string{"A": "", "HOME": "/c"}}, root,
			&harenav1.ProcessDefaults{Cwd: "/w", Env: map[string]string{"A": "1", "HOME": "/s", "PATH": "/p", "B": "2"}},
			[]string{"A=", "B=2", "HOME=/c", "HOSTNAME=box", "PATH=/p", "USER=root"}, "/w", false,
		},
		{
			"a terminal", &harenav1.Command{Shell: "x", Cwd: "/c", Pty: &harenav1.Pty{}}, root, &harenav1.ProcessDefaults{Cwd: "/w"},
			[]string{"HOME=/root", "HOSTNAME=box", "PATH=" + defaultPath, "TERM=xterm-256color", "USER=root"}, "/c", false,
		},
		{
			"a terminal of a type", &harenav1.Command{Shell: "x", Pty: &harenav1.Pty{Term: "vt100"}}, users.User{Name: "u"},
			&harenav1.ProcessDefaults{Env: map[string]string{"TERM": "dumb"}},
			[]string{"HOME=/", "HOSTNAME=box", "PATH=" + defaultPath, "TERM=vt100", "USER=u"}, "/", false,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := plan(tt.cmd, tt.user, tt.def, "box")
			if !slices.Equal(s.Env, tt.env) || s.Cwd != tt.cwd || s.CwdOrRoot != tt.orRoot {
				t.Errorf("got %q in %q (%v)", s.Env, s.Cwd, s.CwdOrRoot)
			}
			if !slices.Equal(s.Argv, []string{"/bin/sh", "-c", "x"}) || !slices.Equal(s.Paths, []string{"/bin/sh"}) {
				t.Errorf("got %q, %q", s.Argv, s.Paths)
			}
		})
	}
	s := plan(&harenav1.Command{Argv: []string{"ls"}, Env: map[string]string{"PATH": "/only"}}, users.User{UID: 1, GID: 2, Groups: []uint32{3}}, nil, "box")
	if !slices.Equal(s.Paths, []string{"/only/ls"}) || s.UID != 1 || s.GID != 2 || !reflect.DeepEqual(s.Groups, []uint32{3}) {
		t.Errorf("got %+v", s)
	}
}

func TestSignalNames(t *testing.T) {
	for text, want := range map[string]unix.Signal{
		"": unix.SIGTERM, "SIGKILL": unix.SIGKILL, "kill": unix.SIGKILL, "Hup": unix.SIGHUP, "9": unix.SIGKILL, "64": 64, "1": unix.SIGHUP,
	} {
		if got, err := parseSignal(text); got != want || err != nil {
			t.Errorf("%q: got %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"0", "65", "-1", "SIG", "SIGSIGTERM", "x", "9 "} {
		if got, err := parseSignal(text); err == nil {
			t.Errorf("%q: got %v", text, got)
		}
	}
	for n, want := range map[int]string{9: "SIGKILL", 34: "SIGRTMIN+2", 99: "signal 99"} {
		if got := signalName(n); got != want {
			t.Errorf("%d: got %q", n, got)
		}
	}
}

func TestWhyAProgramWasNotStarted(t *testing.T) {
	spec := zygote.Spec{Argv: []string{"prog"}, Cwd: "/dir"}
	tests := []struct {
		exit zygote.Exit
		code int32
		text string
	}{
		{zygote.Exit{Code: 127, ExecErrno: int(unix.ENOENT), Stage: "exec"}, 127, `"prog" not found in PATH`},
		{zygote.Exit{Code: 126, ExecErrno: int(unix.ENOEXEC), Stage: "exec"}, 126, "exec format error"},
		{zygote.Exit{Code: 126, ExecErrno: int(unix.E2BIG), Stage: "exec"}, 126, "argument list too long"},
		{zygote.Exit{Code: 127, ExecErrno: int(unix.ENOENT), Stage: "chdir"}, 126, `"/dir": no such file`},
		{zygote.Exit{Code: 126, ExecErrno: int(unix.EPERM), Stage: "ids"}, 126, "ids: operation not permitted"},
	}
	for _, tt := range tests {
		r := &harenav1.Result{}
		setStatus(r, tt.exit, spec)
		if r.GetExitCode() != tt.code || !strings.Contains(r.GetMessage(), tt.text) {
			t.Errorf("%+v: got %d %q", tt.exit, r.GetExitCode(), r.GetMessage())
		}
	}
}
