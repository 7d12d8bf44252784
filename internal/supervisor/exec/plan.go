package exec

import (
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
	"github.com/harena-dev/harena/internal/supervisor/users"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

// defaultPath is Docker's, for commands whose environment has no PATH.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// validate checks what a client sent, before anything is looked up.
func validate(cmd *harenav1.Command) error {
	forms := 0
	for _, given := range []bool{len(cmd.GetArgv()) > 0, len(cmd.GetArgvBytes()) > 0, cmd.GetShell() != ""} {
		if given {
			forms++
		}
	}
	if forms != 1 {
		return errs.E(errs.Invalid, "a command needs exactly one of argv, argv_bytes and shell, got %d", forms)
	}
	if cmd.GetSession() != "" {
		if err := validateInSession(cmd); err != nil {
			return err
		}
	}
	for _, err := range []error{
		validateArgs(argv(cmd)),
		sandbox.ValidateEnv(cmd.GetEnv()),
		validateCwd(cmd.GetCwd()),
		validateID("op_id", cmd.GetOpId()),
		validatePty(cmd.GetPty()),
		atMost("bytes of stdin in a command", len(cmd.GetStdin()), maxInput),
		atMost("bytes of tag", len(cmd.GetTag()), maxTag),
		atMost("max_output", cmd.GetMaxOutput(), maxOutput),
	} {
		if err != nil {
			return err
		}
	}
	if n := cmd.GetMaxOutput(); n < 0 {
		return errs.E(errs.Invalid, "max_output of %d is negative", n)
	}
	if t := cmd.GetTimeout(); t != nil {
		if err := t.CheckValid(); err != nil {
			return errs.E(errs.Invalid, "timeout is not a valid duration: %w", err)
		}
		if t.AsDuration() <= 0 {
			return errs.E(errs.Invalid, "timeout of %v is not positive", t.AsDuration()).WithHint("leave it out for none")
		}
	}
	return nil
}

func atMost[T int | int64](name string, n, limit T) error {
	if n > limit {
		return errs.OverLimit(errs.Invalid, name, limit, n)
	}
	return nil
}

func validateArgs(args []string) error {
	total := 0
	for _, a := range args {
		if strings.IndexByte(a, 0) >= 0 {
			return errs.E(errs.Invalid, "an argument has a NUL byte").WithHint("pass such data through stdin or a file")
		}
		if len(a) > maxArg {
			return errs.OverLimit(errs.Invalid, "bytes of one argument", maxArg, len(a)).
				WithHint("pass long text through stdin or a file")
		}
		total += len(a) + 1
	}
	if args[0] == "" {
		return errs.E(errs.Invalid, "the name of the program is empty")
	}
	return atMost("bytes of arguments", total, maxArgs)
}

func validateCwd(cwd string) error {
	if cwd == "" {
		return nil
	}
	if cwd[0] != '/' || strings.IndexByte(cwd, 0) >= 0 {
		return errs.E(errs.Invalid, "cwd %.80q is not an absolute path", cwd)
	}
	return atMost("bytes of cwd", len(cwd), maxCwd)
}

// validateID checks an op_id or a request_id.
func validateID(field, id string) error {
	for i := range len(id) {
		if id[i] < ' ' || id[i] > '~' {
			return errs.E(errs.Invalid, "%s %.80q is not printable ASCII", field, id)
		}
	}
	return atMost("characters of "+field, len(id), maxID)
}

func validatePty(pty *harenav1.Pty) error {
	if err := validateSize(pty.GetCols(), pty.GetRows()); err != nil {
		return err
	}
	if strings.IndexByte(pty.GetTerm(), 0) >= 0 {
		return errs.E(errs.Invalid, "pty.term has a NUL byte")
	}
	return atMost("bytes of pty.term", len(pty.GetTerm()), maxTerm)
}

func validateSize(cols, rows uint32) error {
	// struct winsize has 16 bits for each.
	return atMost("rows and columns of a terminal", int64(max(cols, rows)), 0xffff)
}

// argv returns the arguments in the form in which they are executed.
func argv(cmd *harenav1.Command) []string {
	switch {
	case len(cmd.GetArgv()) > 0:
		return cmd.GetArgv()
	case len(cmd.GetArgvBytes()) > 0:
		args := make([]string, len(cmd.GetArgvBytes()))
		for i, a := range cmd.GetArgvBytes() {
			args[i] = string(a)
		}
		return args
	}
	return []string{"/bin/sh", "-c", cmd.GetShell()}
}

// plan decides everything about a command that Spec has, except descriptors.
func plan(cmd *harenav1.Command, u users.User, d *harenav1.ProcessDefaults, hostname string) zygote.Spec {
	env := environment(cmd, u, d, hostname)
	s := zygote.Spec{
		Argv: argv(cmd), UID: u.UID, GID: u.GID, Groups: u.Groups, Terminal: cmd.GetPty() != nil,
	}
	s.Paths = programs(s.Argv[0], env["PATH"])
	for _, k := range slices.Sorted(maps.Keys(env)) {
		s.Env = append(s.Env, k+"="+env[k])
	}
	switch {
	case cmd.GetCwd() != "":
		s.Cwd = cmd.GetCwd()
	case d.GetCwd() != "":
		s.Cwd = d.GetCwd()
	case u.Home != "" && u.Home[0] == '/':
		s.Cwd, s.CwdOrRoot = u.Home, true
	default:
		s.Cwd = "/"
	}
	return s
}

// environment layers, lowest first: what Docker sets when nobody does, what
// the sandbox sets, the terminal's type, what the command sets.
func environment(cmd *harenav1.Command, u users.User, d *harenav1.ProcessDefaults, hostname string) map[string]string {
	env := map[string]string{"PATH": defaultPath, "HOME": u.Home, "HOSTNAME": hostname}
	if u.Home == "" {
		env["HOME"] = "/"
	}
	if u.Name != "" {
		env["USER"] = u.Name
	}
	if cmd.GetPty() != nil {
		env["TERM"] = "xterm-256color"
	}
	maps.Copy(env, d.GetEnv())
	if term := cmd.GetPty().GetTerm(); term != "" {
		env["TERM"] = term
	}
	maps.Copy(env, cmd.GetEnv())
	return env
}

// programs lists the candidates for a program as execvp(3) does: a name with a
// slash is itself; an empty element of PATH is the current directory, which
// the spawner has entered when it tries them.
func programs(name, search string) []string {
	if strings.IndexByte(name, '/') >= 0 {
		return []string{name}
	}
	var out []string
	for _, dir := range strings.Split(search, ":") {
		p := "./" + name
		if dir != "" {
			p = strings.TrimSuffix(dir, "/") + "/" + name
		}
		if len(p) > maxCwd || slices.Contains(out, p) {
			continue
		}
		if out = append(out, p); len(out) == maxProgram {
			break
		}
	}
	if out == nil {
		out = []string{"./" + name} // fails with ENAMETOOLONG, which is the truth
	}
	return out
}

// commandLine is how listings show a command.
func commandLine(cmd *harenav1.Command) string {
	line := cmd.GetShell()
	if line == "" {
		args := argv(cmd)
		words := make([]string, 0, len(args))
		for n := 0; len(words) < len(args) && n <= maxLine; n += len(words[len(words)-1]) + 1 {
			words = append(words, quote(args[len(words)]))
		}
		line = strings.Join(words, " ")
	}
	if len(line) > maxLine {
		cut := maxLine
		for cut > maxLine-utf8.UTFMax && !utf8.RuneStart(line[cut]) {
			cut--
		}
		line = line[:cut]
	}
	return strings.ToValidUTF8(line, "\uFFFD")
}

// quote makes an argument readable for a person and for a shell.
func quote(arg string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("%+,-./:=@_", r) || r > 0x7f
	}
	if arg != "" && strings.IndexFunc(arg, func(r rune) bool { return !plain(r) }) < 0 {
		return arg
	}
	return "'" + strings.ReplaceAll(arg, "'", `'\''`) + "'"
}
