package exec

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/users"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

const (
	maxSessions = 64
	// startWithin bounds the start of a shell, and how long it may take to read a command.
	startWithin = 30 * time.Second
	// shellGrace is what a shell has to tell that its command ended, when all that the command had started was killed.
	shellGrace = time.Second
	maxStatus  = 64
	whyClosed  = "it was closed"
)

// shellKind is one kind of shell.
type shellKind struct {
	name  string
	paths []string
	// via calls a command that is built in, also when a function has its name, and so that an error in what eval reads does not end the
	// shell. It is quoted against aliases.
	via string
}

// usualShells are tried in order; the first that the sandbox has is it.
func usualShells() []shellKind {
	return []shellKind{
		{"bash", []string{"/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash"}, `\builtin`},
		// POSIX shells have no builtin.
		{"sh", []string{"/bin/sh", "/usr/bin/sh"}, `\command`},
	}
}

// session is a shell that runs commands one after the other.
//
// It reads its script from a pipe of ours, which is its standard input: for each command one `eval` of its quoted text, and a
// line that writes how it ended to another pipe, descriptor 3. A command has neither: its standard input is /dev/null, and
// shells keep what they redirect around an eval closed to programs. So what commands print is never read as anything but output, and ends
// exactly where the shell says that the command ended: it writes nothing until it is sent the next one.
//
// The shell is not trusted. Who takes its descriptors from it, or makes it do what it likes, decides how commands of this session
// seem to end, which it could anyway; a word that changes with each command keeps what does so by accident from being believed.
// One that does not tell any more is found out by watch.
type session struct {
	s       *Service
	name    string
	user    users.User
	created time.Time
	ready   chan struct{} // closed when the shell runs, or err is set
	err     error

	// Set before ready is closed.
	shell       shellKind
	proc        zygote.Process
	pid         int // on the node
	group       *group
	control     *os.File
	out, outErr *os.File

	// turn is held by the command that runs, and at last by the end.
	turn chan struct{}
	// lines are what the shell says, until it ends.
	lines chan string
	gone  chan struct{} // closed when the shell has ended; then exit is final
	exit  zygote.Exit

	mu      sync.Mutex
	current string // command
	why     string // it ended, or is to end
}

// sessions of one sandbox, by name. Those that ended stay until they are closed or made anew, so that nobody takes a
// fresh shell for the one that had his variables.
type sessions struct {
	mu     sync.Mutex
	byName map[string]*session
}

func (k *sessions) list() []*session {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := make([]*session, 0, len(k.byName))
	for _, ses := range k.byName {
		out = append(out, ses)
	}
	return out
}

// kill ends all shells, without waiting.
func (k *sessions) kill() error {
	var failed error
	for _, ses := range k.list() {
		select {
		case <-ses.ready:
			if ses.err == nil {
				failed = errors.Join(failed, ses.kill("the sandbox was stopped"))
			}
		default: // its start notices
		}
	}
	return failed
}

// makeSession makes a session and starts its shell. exists: there is one that lives.
func (s *Service) makeSession(ctx context.Context, name, user string) (*session, error) {
	if user == "" {
		user = s.cfg.Defaults.GetUser()
	}
	u, err := s.cfg.Users.Resolve(ctx, user)
	if err != nil {
		return nil, err
	}
	ses := &session{
		s: s, name: name, user: u, created: s.cfg.Now(), ready: make(chan struct{}), turn: make(chan struct{}, 1),
		lines: make(chan string, 1), gone: make(chan struct{}),
	}
	if err := s.addSession(ses); err != nil {
		return nil, err
	}
	ses.err = ses.start(ctx)
	close(ses.ready)
	if ses.err != nil {
		s.dropSession(ses)
		return nil, ses.err
	}
	s.logSession(&harenav1.LogSession{Name: name, User: user, Event: "created", Shell: ses.shell.name})
	return ses, nil
}

func (s *Service) addSession(ses *session) error {
	if s.cfg.FilesOnly {
		return errs.E(errs.Precondition, "sandbox %s has failed: it has no sessions any more", s.cfg.SandboxID)
	}
	s.mu.Lock()
	closing := s.closing
	s.mu.Unlock()
	k := &s.sessions
	k.mu.Lock()
	defer k.mu.Unlock()
	old := k.byName[ses.name]
	switch {
	case closing:
		return errs.E(errs.Precondition, "the sandbox is stopping")
	case old != nil && !old.hasEnded():
		return errs.E(errs.Exists, "session %q exists already", ses.name).WithHint("close it first, or use it")
	case old == nil && len(k.byName) >= maxSessions:
		return errs.OverLimit(errs.Capacity, "sessions of a sandbox, ended ones included", maxSessions, len(k.byName)+1).WithHint("close some")
	}
	if k.byName == nil {
		k.byName = map[string]*session{}
	}
	k.byName[ses.name] = ses
	return nil
}

func (s *Service) dropSession(ses *session) {
	s.sessions.mu.Lock()
	defer s.sessions.mu.Unlock()
	if s.sessions.byName[ses.name] == ses {
		delete(s.sessions.byName, ses.name)
	}
}

// session returns the session of a command; when there never was one of the name it is made.
func (s *Service) session(ctx context.Context, name, user string) (*session, error) {
	for {
		s.sessions.mu.Lock()
		ses := s.sessions.byName[name]
		s.sessions.mu.Unlock()
		if ses == nil {
			ses, err := s.makeSession(ctx, name, user)
			if errs.Is(err, errs.Exists) {
				continue // another command made it
			}
			return ses, err
		}
		select {
		case <-ses.ready:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if ses.err != nil {
			return nil, ses.err
		}
		if user != "" {
			u, err := s.cfg.Users.Resolve(ctx, user)
			if err != nil {
				return nil, err
			}
			if u.UID != ses.user.UID || u.GID != ses.user.GID {
				return nil, errs.E(errs.Invalid, "session %q is of user %s, not %s", name, userName(ses.user), userName(u)).WithHint("leave user out, or use another session")
			}
		}
		return ses, nil
	}
}

func userName(u users.User) string {
	if u.Name != "" {
		return u.Name
	}
	return fmt.Sprint(u.UID)
}

// start starts the shell, and returns when it reads commands.
func (ses *session) start(ctx context.Context) (err error) {
	s := ses.s
	// Of the numbers of commands, which are never used twice.
	s.mu.Lock()
	id := fmt.Sprintf("s%d", s.numbers.next())
	s.mu.Unlock()
	if ses.group, err = makeGroup(s.cfg.Groups, id); err != nil {
		return err
	}
	for i, shell := range s.cfg.shells {
		ses.shell = shell
		var found bool
		if found, err = ses.try(ctx, shell.paths, i == len(s.cfg.shells)-1); found || err != nil {
			break
		}
	}
	if err != nil {
		if kerr := ses.group.path.Kill(); kerr != nil {
			s.cfg.Log.Error("kill a shell that did not start", "session", ses.name, "error", kerr)
		}
		return errors.Join(err, ses.group.remove())
	}
	return nil
}

// try starts one kind of shell; false: the sandbox does not have it.
func (ses *session) try(ctx context.Context, paths []string, last bool) (found bool, err error) {
	s := ses.s
	d, err := s.pipes(ses.user.UID, ses.user.GID, true)
	if err != nil {
		return false, err
	}
	if err := shrink(d.in); err != nil {
		d.closeAll()
		return false, fmt.Errorf("prepare a pipe: %w", err)
	}
	defer func() {
		if !found {
			d.closeAll()
		}
	}()
	status, theirs, err := s.pipe(ses.user.UID, ses.user.GID, true)
	if err != nil {
		return false, err
	}
	spec := plan(&harenav1.Command{Argv: []string{ses.shell.name}}, ses.user, s.cfg.Defaults, s.cfg.Hostname)
	spec.Paths, spec.Cgroup = paths, ses.group.dir
	spec.Stdin, spec.Stdout, spec.Stderr, spec.Extra = d.stdin, d.stdout, d.stderr, theirs
	ses.proc, err = s.cfg.Spawner.Spawn(s.ctx, spec)
	theirs.Close()
	d.closeTheirs()
	if err != nil {
		status.Close()
		return false, err
	}
	lines, ended := make(chan string, 1), make(chan zygote.Exit, 1)
	s.wg.Add(2)
	go func() {
		defer s.wg.Done()
		readStatus(status, lines)
	}()
	go func() {
		defer s.wg.Done()
		exit, err := ses.proc.Wait(s.ctx)
		if err != nil {
			exit = zygote.Exit{Code: -1, Signal: int(unix.SIGKILL)}
		}
		ended <- exit
	}()
	ses.control, ses.out, ses.outErr, ses.lines = d.in, d.out, d.err, lines
	wait, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	word := rand.Text()
	if err := ses.send(ses.shell.report(word)); err == nil {
		select {
		case line, open := <-lines:
			if _, ok := parseStatus(line, word); ok {
				return true, ses.begun(ended)
			}
			if open {
				return false, errs.E(errs.Precondition, "the shell %s of the sandbox does not work", ses.shell.name)
			}
			// Nobody has the pipe any more: the shell ended, if it ever was.
			select {
			case exit := <-ended:
				ended <- exit
			case <-wait.Done():
				return false, errs.E(errs.Precondition, "the shell %s of the sandbox does not work: it closed its descriptors", ses.shell.name)
			}
		case exit := <-ended:
			ended <- exit
		case <-wait.Done():
			return false, errs.E(errs.KindOf(context.Cause(wait)), "the shell of session %q did not start in time", ses.name)
		}
	}
	exit := <-ended
	if exit.ExecErrno != 0 && !last {
		return false, nil
	}
	_, why := notStarted(exit, spec)
	if exit.ExecErrno == 0 {
		why = fmt.Sprintf("it ended with exit code %d, signal %d", exit.Code, exit.Signal)
	}
	return false, errs.E(errs.Precondition, "the shell of session %q could not be started: %s", ses.name, why)
}

// begun takes over a shell that runs.
func (ses *session) begun(ended <-chan zygote.Exit) error {
	pids, err := ses.group.path.Tree()
	if err != nil || len(pids) != 1 {
		return errors.Join(err, errs.E(errs.Precondition, "the shell of session %q started %d processes by itself", ses.name, len(pids)-1))
	}
	ses.pid = pids[0]
	ses.s.wg.Add(1)
	go ses.follow(ended)
	return nil
}

// readStatus hands on what the shell says, line by line, to the end of the pipe.
func readStatus(f *os.File, lines chan string) {
	defer close(lines)
	defer f.Close()
	r := bufio.NewReaderSize(f, maxStatus)
	for {
		line, err := r.ReadSlice('\n')
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
		select {
		case lines <- string(line):
		default:
			// Nobody waits for more than one: it is not the shell's. One word that is wrong ends the session, and who goes on
			// writing is told so by a broken pipe, without work for us.
			select {
			case <-lines:
			default:
			}
			lines <- "too much"
			return
		}
	}
}

// report makes the shell tell the exit status of the line before. What the shell traces stays out of the command's output.
func (k shellKind) report(word string) string {
	return `{ ` + k.via + ` printf '%s %s\n' ` + word + ` "$?" >&3; } 2>/dev/null` + "\n"
}

func parseStatus(line, word string) (code int, ok bool) {
	said, number, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
	code, err := strconv.Atoi(number)
	return code, ok && said == word && err == nil && code >= 0 && code <= 255
}

// send writes to the shell's script.
func (ses *session) send(text string) error {
	if err := ses.control.SetWriteDeadline(time.Now().Add(startWithin)); err != nil {
		return err
	}
	_, err := ses.control.WriteString(text)
	return err
}

// follow waits for the end of the shell, and ends the session with it.
func (ses *session) follow(ended <-chan zygote.Exit) {
	s := ses.s
	defer s.wg.Done()
	ses.exit = <-ended
	ses.mu.Lock()
	if ses.why == "" {
		ses.why = "its shell exited with status " + strconv.Itoa(ses.exit.Code)
		if ses.exit.Signal != 0 {
			ses.why = "its shell was ended by " + signalName(ses.exit.Signal)
		}
	}
	why := ses.why
	ses.mu.Unlock()
	if err := ses.group.path.Kill(); err != nil {
		s.cfg.Log.Error("kill what a session left behind", "session", ses.name, "error", err)
	}
	close(ses.gone)
	event := "ended"
	if why == whyClosed {
		event = "closed"
	}
	s.logSession(&harenav1.LogSession{Name: ses.name, User: userName(ses.user), Event: event, Shell: ses.shell.name, Reason: why})
	ses.turn <- struct{}{} // the last command has all of its output
	for _, f := range []*os.File{ses.control, ses.out, ses.outErr} {
		f.Close()
	}
	if err := ses.group.remove(); err != nil {
		s.cfg.Log.Error("remove cgroup of a session", "session", ses.name, "error", err)
	}
	<-ses.turn
}

func (ses *session) hasEnded() bool {
	select {
	case <-ses.gone:
		return true
	default:
		return false
	}
}

// kill ends the session with everything in it.
func (ses *session) kill(why string) error {
	ses.mu.Lock()
	if ses.why == "" {
		ses.why = why
	}
	ses.mu.Unlock()
	if ses.hasEnded() {
		return nil
	}
	return ses.group.path.Kill()
}

// signal signals what the commands started, not the shell: it would end, and the session with it.
func (ses *session) signal(sig unix.Signal) error {
	if ses.hasEnded() {
		return nil
	}
	return ses.group.signalOthers(sig, ses.pid)
}

func (ses *session) info() *harenav1.Session {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	out := &harenav1.Session{
		Name: ses.name, User: userName(ses.user), Shell: ses.shell.name, Pid: int64(ses.proc.Pid()), Created: timestamppb.New(ses.created), CommandId: ses.current,
	}
	if ses.hasEnded() {
		out.Ended = ses.why
	}
	return out
}
