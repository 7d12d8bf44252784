package datadir

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/edge/lifecycle/idrange"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// owner is the content of a slot's file: who claims it.
type owner struct {
	Edge sandbox.EdgeID `json:"edge"`
	Dir  string         `json:"dir"`
	Boot string         `json:"boot"`
	Pid  int            `json:"pid"`
}

// claim is a slot that this process holds: the file says so to those who look when no server runs, the lock on it to
// those who look while one does.
type claim struct {
	slot int
	path string
	f    *os.File
}

// claimSlot takes the slot that me held before, else one that nobody claims. A claim is void when its boot is over, or when
// the data directory it names does not agree.
func claimSlot(dir string, preferred int, me owner) (*claim, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, Fault("claim host IDs", dir, err)
	}
	if err := refuseTwin(dir, me); err != nil {
		return nil, err
	}
	order := make([]int, 0, idrange.Slots+1)
	if preferred >= 1 && preferred <= idrange.Slots {
		order = append(order, preferred)
	}
	for n := 1; n <= idrange.Slots; n++ {
		order = append(order, n)
	}
	for _, n := range order {
		c, err := tryClaim(filepath.Join(dir, strconv.Itoa(n)), n, me)
		if err != nil {
			return nil, Fault("claim host IDs", dir, err)
		}
		if c != nil {
			return c, nil
		}
	}
	return nil, errs.OverLimit(errs.Capacity, "nodes on one kernel", idrange.Slots, idrange.Slots+1).
		WithHint("run `harena down` on a node that is not needed; %s names them", dir)
}

// refuseTwin finds a node with this edge ID in another directory: a copy, which would share cgroups with the original.
func refuseTwin(dir string, me owner) error {
	for n := 1; n <= idrange.Slots; n++ {
		o, err := readOwner(filepath.Join(dir, strconv.Itoa(n)))
		if err == nil && o.Edge == me.Edge && o.Dir != me.Dir && o.valid(me.Boot) {
			return errs.E(errs.Precondition, "data directory %s is a copy of %s, which is in use: both are edge %s", me.Dir, o.Dir, me.Edge).
				WithHint("remove node.json and sandboxes from the copy to make it a node of its own")
		}
	}
	return nil
}

func readOwner(path string) (owner, error) {
	var o owner
	err := readJSON(path, &o)
	return o, err
}

// valid reports whether the claim still counts.
func (o owner) valid(boot string) bool {
	if o.Boot != boot {
		return false
	}
	var n nodeFile
	return readJSON(filepath.Join(o.Dir, "node.json"), &n) == nil && n.Edge == o.Edge
}

func tryClaim(path string, n int, me owner) (*claim, error) {
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			_ = f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, nil
			}
			return nil, err
		}
		// Somebody may have removed the file between open and lock; then the lock is on nothing.
		if !sameFile(f, path) {
			_ = f.Close()
			continue
		}
		var o owner
		content, err := io.ReadAll(f)
		if err == nil && json.Unmarshal(content, &o) == nil && o.valid(me.Boot) && (o.Edge != me.Edge || o.Dir != me.Dir) {
			_ = f.Close()
			return nil, nil
		}
		if err == nil {
			err = overwrite(f, me)
		}
		if err != nil {
			_ = f.Close()
			return nil, err
		}
		return &claim{slot: n, path: path, f: f}, nil
	}
}

func sameFile(f *os.File, path string) bool {
	a, err := f.Stat()
	if err != nil {
		return false
	}
	b, err := os.Stat(path)
	return err == nil && os.SameFile(a, b)
}

func overwrite(f *os.File, me owner) error {
	b, err := json.Marshal(me)
	if err != nil {
		return fmt.Errorf("encode a claim: %w", err)
	}
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err = f.WriteAt(append(b, '\n'), 0)
	return err
}

func (c *claim) close() { _ = c.f.Close() }

func (c *claim) remove() { _ = os.Remove(c.path) }
