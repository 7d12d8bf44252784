package launch

import (
	"context"
	"os"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/zygote"
)

// StartFileWorker starts a file worker with the IDs given, which are those inside. It gets req as descriptor
// 0, resp as 1, /dev/null as 2 and Root as 3. The caller keeps its copies. It is outside the sandbox's pid namespace and
// pids limit: nothing inside can see, signal or starve it.
func (s *Sandbox) StartFileWorker(ctx context.Context, uid, gid uint32, groups []uint32, req, resp *os.File) (*os.Process, error) {
	select {
	case <-s.Done():
		return nil, errs.E(errs.Precondition, "the sandbox has ended: %s", s.Reason())
	default:
	}
	c := s.launch.GetCgroups()
	group, err := openPath(c.GetFilesTracking(), unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	defer group.Close() //nolint:errcheck // a directory
	tasks, closeTasks, err := openTasks(c.GetFilesV1())
	defer closeTasks()
	if err != nil {
		return nil, err
	}
	return s.p.image.Enter(ctx, zygote.Entry{
		Init: s.initFd, UID: uid, GID: gid, Groups: groups,
		Program: s.p.worker, Argv: []string{"init", "files"},
		// One operation at a time: more threads would only cost start-up time.
		Env:   []string{"GOMAXPROCS=1"},
		Stdin: req, Stdout: resp, Root: s.Root,
		Cgroup:  group,
		V1Tasks: tasks,
	})
}
