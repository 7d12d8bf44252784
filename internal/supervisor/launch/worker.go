package launch

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/cgroup"
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
	return s.p.image.Enter(ctx, zygote.Entry{
		Init: s.initFd, UID: uid, GID: gid, Groups: groups,
		Program: s.p.worker, Argv: []string{"init", "files"},
		// One operation at a time: more threads would only cost start-up time.
		Env:   []string{"GOMAXPROCS=1"},
		Stdin: req, Stdout: resp, Root: s.Root,
		Cgroup: group,
		Started: func(pid int) error {
			for _, d := range c.GetFilesV1() {
				if err := cgroup.Dir(d).Attach(pid); err != nil {
					return fmt.Errorf("put the file worker into its cgroup: %w", err)
				}
			}
			return nil
		},
	})
}
