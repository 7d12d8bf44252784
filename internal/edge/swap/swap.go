// Package swap gives a node somewhere to put the memory of paused sandboxes: compressed memory (zram), a file, or both.
//
// What is made carries the edge's label in its swap header (mkswap -L), so that it is found again after a restart or a kill -9
// whatever the device is called, and nothing of others is ever touched. What is wanted is kept in DIR/swap.json, so that a
// node has it again after a reboot.
package swap

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

// Priorities: zram first, since it is faster. Swap that the node has besides is below both.
const (
	zramPriority = 100
	filePriority = 10
)

// MinSize is the least that is worth the name.
const MinSize = 1 << 20

const (
	stateName = "swap.json"
	fileName  = "swapfile"
)

// Want says what there is to be, in bytes. Nil leaves it as it is, zero removes it.
type Want struct{ Zram, File *int64 }

// Swap is the swap of one node.
type Swap struct {
	dir  string
	edge sandbox.EdgeID
	sys  system
	file state
}

// state is what is kept on disk.
type state struct {
	Format int   `json:"format"`
	Zram   int64 `json:"zram"`
	File   int64 `json:"file"`
	// Added: the zram device was added by us, and is removed with its content.
	Added string `json:"added,omitempty"`
}

// Open makes the node's swap what is wanted. Errors: invalid, unsupported, capacity.
func Open(dir string, edge sandbox.EdgeID, w Want) (*Swap, error) {
	s := &Swap{dir: dir, edge: edge, sys: system{sys: "/sys", dev: "/dev", swaps: "/proc/swaps"}}
	if err := s.load(); err != nil {
		return nil, err
	}
	for _, v := range []struct {
		name string
		want *int64
		have *int64
	}{{"zram", w.Zram, &s.file.Zram}, {"swap", w.File, &s.file.File}} {
		if v.want == nil {
			continue
		}
		if n := *v.want; n < 0 || n > 0 && n < MinSize {
			return nil, errs.E(errs.Invalid, "--%s of %d bytes is too small", v.name, n).WithHint("use at least 1m, or 0 for none")
		}
		*v.have = *v.want
	}
	if s.file.Zram == 0 && s.file.File == 0 && w.Zram == nil && w.File == nil {
		return s, nil
	}
	// Before the effects, so that Close finds what a kill leaves.
	if err := s.save(); err != nil {
		return nil, err
	}
	if err := s.ensureZram(s.file.Zram); err != nil {
		return nil, fmt.Errorf("set zram up: %w", err)
	}
	if err := s.ensureFile(s.file.File); err != nil {
		return nil, fmt.Errorf("set the swap file up: %w", err)
	}
	return s, nil
}

// Remove takes the node's swap away, for a node that goes down. What is in it comes back into memory. It is made again by the
// next Open.
func (s *Swap) Remove() error {
	if s.file.Zram == 0 && s.file.File == 0 {
		return nil
	}
	return errors.Join(s.ensureFile(0), s.ensureZram(0))
}

func (s *Swap) label(kind string) string { return "harena-" + string(s.edge) + kind }

func (s *Swap) load() error {
	b, err := os.ReadFile(filepath.Join(s.dir, stateName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(b, &s.file)
	}
	if err != nil || s.file.Format != 1 || s.file.Zram < 0 || s.file.File < 0 {
		return errs.E(errs.Precondition, "%s cannot be read: format %d, %w", filepath.Join(s.dir, stateName), s.file.Format, err).
			WithHint("remove the file, and give --zram and --swap again")
	}
	return nil
}

func (s *Swap) save() error {
	s.file.Format = 1
	b, err := json.Marshal(s.file)
	if err != nil {
		return err
	}
	path := filepath.Join(s.dir, stateName)
	if err := os.WriteFile(path+".tmp", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}

// Checks reports whether paused sandboxes can give their memory back.
func (s *Swap) Checks() []*harenav1.Check {
	const name = "swap"
	all, err := s.sys.list()
	if err != nil {
		return []*harenav1.Check{{Name: name, Status: "failed", Detail: err.Error(), Hint: "look at /proc/swaps"}}
	}
	if len(all) == 0 {
		return []*harenav1.Check{{
			Name: name, Status: "degraded", Detail: "the node has no swap: a paused sandbox gives back cached files only, not the memory of its processes",
			Hint: "`harena up --zram SIZE` (compressed, in memory) or `--swap SIZE` (a file in the data directory) adds some",
		}}
	}
	detail := ""
	full := true
	for _, a := range all {
		if detail != "" {
			detail += "; "
		}
		detail += fmt.Sprintf("%s: %d of %d MiB used", a.path, a.used>>20, a.size>>20)
		full = full && a.used >= a.size-a.size/64
	}
	if full {
		return []*harenav1.Check{{Name: name, Status: "degraded", Detail: detail, Hint: "swap is full; add some with --zram or --swap"}}
	}
	return []*harenav1.Check{{Name: name, Status: "ok", Detail: detail}}
}
