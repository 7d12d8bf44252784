package exec

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/journal"
)

// forget removes a command that was admitted and not started.
func (s *Service) forget(c *command) {
	s.opMu.Lock()
	defer s.opMu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.alive, c.id)
	s.running--
	if c.opID == "" {
		return
	}
	delete(s.ops, c.opID)
	select {
	case <-s.cfg.Spawner.Done():
		// It may have been started all the same, just before the sandbox ended.
		s.journal.Leave(c.opID)
	default:
		if err := s.journal.Cancel(c.opID); err != nil {
			s.cfg.Log.Error("forget an operation that was not started", "command", c.id, "error", err)
		}
	}
}

// left counts a command as ended, though its children may live on.
func (s *Service) left(*command) {
	s.mu.Lock()
	s.running--
	s.mu.Unlock()
	s.cfg.Activity()
}

// retire keeps a command of which nothing runs any more among the ended ones,
// and drops what exceeds the bounds.
func (s *Service) retire(c *command) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.alive, c.id)
	s.keep(c)
}

// keep adds an ended command; mu is held.
func (s *Service) keep(c *command) {
	s.ended = append(s.ended, c)
	s.endedIDs[c.id] = c
	s.endedMemory += c.memBytes()
	for len(s.ended) > s.cfg.Limits.Ended {
		old := s.ended[0]
		s.evict(old)
		delete(s.endedIDs, old.id)
		if s.ops[old.opID] == old {
			delete(s.ops, old.opID)
		}
		s.ended[0] = nil
		s.ended = s.ended[1:]
	}
	for _, old := range s.ended {
		if s.endedMemory <= s.cfg.Limits.EndedMemory {
			break
		}
		s.toDisk(old)
	}
}

// toDisk moves an ended record to files, or drops it when they cannot be written; mu is held.
func (s *Service) toDisk(c *command) {
	n := c.memBytes()
	if n == 0 {
		return
	}
	for _, st := range c.streams {
		st.appending.Lock()
		st.rec.reserve = s.reserveLocked
		var err error
		if st.rec.size > 0 {
			err = st.toFile()
		}
		st.rec.reserve = s.reserve
		st.appending.Unlock()
		if err != nil {
			s.cfg.Log.Warn("a record is dropped", "command", c.id, "error", err)
			s.evict(c)
			return
		}
		st.close()
	}
	s.endedMemory -= n
}

// evict drops the record of an ended command; mu is held.
func (s *Service) evict(c *command) {
	mem, disk := c.memBytes(), c.fileBytes()
	c.mu.Lock()
	for _, st := range c.streams {
		st.rec.gone, st.rec.mem = true, nil
	}
	c.mu.Unlock()
	s.endedMemory -= mem
	s.fileBytes -= disk
	if disk > 0 {
		if err := os.RemoveAll(c.streams[0].rec.dir); err != nil {
			s.cfg.Log.Error("remove a record", "command", c.id, "error", err)
		}
	}
}

// reserve takes n bytes of the space for records, at the cost of the oldest
// ended commands; negative n gives back.
func (s *Service) reserve(n int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reserveLocked(n)
}

func (s *Service) reserveLocked(n int64) bool {
	for _, old := range s.ended {
		if s.fileBytes+n <= s.cfg.Limits.RecordBytes {
			break
		}
		if old.fileBytes() > 0 {
			s.evict(old)
		}
	}
	if s.fileBytes+n > s.cfg.Limits.RecordBytes {
		return false
	}
	s.fileBytes += n
	return true
}

func (c *command) memBytes() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.streams[0].rec.memBytes() + c.streams[1].rec.memBytes()
}

func (c *command) fileBytes() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.streams[0].rec.fileBytes() + c.streams[1].rec.fileBytes()
}

// find returns a command that is listed.
func (s *Service) find(id string) (*command, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.alive[id]; c != nil {
		return c, nil
	}
	if c := s.endedIDs[id]; c != nil {
		return c, nil
	}
	if e := s.unfinished[id]; e != nil {
		return nil, e.Indeterminate()
	}
	return nil, errs.E(errs.NotFound, "there is no command %.40q", id).On("command %.40s", id).
		WithHint("`harena commands` lists running commands and the last %d that ended", s.cfg.Limits.Ended)
}

// list returns all of them, in the order in which they were started.
func (s *Service) list() []*command {
	s.mu.Lock()
	all := slices.Clone(s.ended)
	for _, c := range s.alive {
		all = append(all, c)
	}
	s.mu.Unlock()
	slices.SortFunc(all, func(a, b *command) int { return cmp.Compare(a.number, b.number) })
	return all
}

// operation finds the command of an op_id, in memory or in the journal; nil
// when there is none. opMu is held.
func (s *Service) operation(opID string, hash digest) (*command, error) {
	s.mu.Lock()
	c := s.ops[opID]
	s.mu.Unlock()
	if c != nil {
		return c, nil
	}
	take := s.journal.Take
	if s.cfg.FilesOnly {
		take = s.journal.Load // nothing is begun
	}
	e, err := take(opID)
	switch {
	case err != nil || e == nil:
		return nil, err
	case e.Kind != "":
		return nil, journal.Used(opID, "a file operation, "+e.Kind)
	case e.Result == nil:
		// Another request under its ID is an error in any case.
		if e.Request != hash.String() {
			return nil, journal.Used(opID, "another command, "+e.Command)
		}
		return nil, e.Indeterminate()
	}
	return s.restore(e)
}

// restore makes a command from its journal entry.
func (s *Service) restore(e *journal.Entry) (*command, error) {
	c := s.newCommand(e.Number, e.Command)
	c.opID, c.line, c.user, c.tag, c.tty, c.pid, c.begun = e.OpID, e.Line, e.User, e.Tag, e.Pty, e.Pid, e.Begun
	b, err := hex.DecodeString(e.Request)
	if err != nil {
		return nil, fmt.Errorf("read the journal: %w", err)
	}
	copy(c.hash[:], b)
	c.result = &harenav1.Result{}
	if err := protojson.Unmarshal(e.Result, c.result); err != nil {
		return nil, fmt.Errorf("read the journal: %w", err)
	}
	c.published, c.state = true, stateEnded
	for i, r := range []*harenav1.StreamRecord{c.result.GetStdout(), c.result.GetStderr()} {
		st := c.streams[i]
		st.eof, st.total, st.rec.size, st.rec.gone, st.rec.full = true, r.GetTotal(), r.GetRecorded(), true, true
		if inline := [][]byte{e.Stdout, e.Stderr}[i]; int64(len(inline)) == st.rec.size {
			st.rec.mem, st.rec.gone = inline, false
			continue
		}
		if info, err := os.Stat(st.rec.path()); err == nil {
			// A detached command went on printing after its result.
			st.rec.inFile, st.rec.gone, st.rec.size = true, false, info.Size()
			st.total = max(st.total, st.rec.size)
		}
	}
	close(c.ready)
	close(c.drained)
	return c, nil
}

// recover reads what an earlier supervisor of this sandbox left behind.
func (s *Service) recover() error {
	entries, err := s.journal.All()
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Kind == "" && e.Result == nil {
			s.unfinished[e.Command] = e
		}
	}
	entries = slices.DeleteFunc(entries, func(e *journal.Entry) bool { return e.Kind != "" || e.Result == nil })
	slices.SortFunc(entries, func(a, b *journal.Entry) int { return cmp.Compare(a.Number, b.Number) })
	known := map[string]bool{}
	for _, e := range entries {
		known[e.Command] = true
		c, err := s.restore(e)
		if err != nil {
			return err
		}
		s.ops[c.opID] = c
		s.fileBytes += c.fileBytes()
		s.keep(c)
	}
	return s.removeOrphans(known)
}

// isCommandID reports whether name is a command's directory. It is no regular expression because that costs each start.
func isCommandID(name string) bool {
	digits, ok := strings.CutPrefix(name, "c")
	return ok && digits != "" && strings.Trim(digits, "0123456789") == ""
}

// removeOrphans removes records of commands that nobody can ask for any more.
func (s *Service) removeOrphans(known map[string]bool) error {
	names, err := os.ReadDir(s.cfg.RecordDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, n := range names {
		if isCommandID(n.Name()) && !known[n.Name()] {
			err = errors.Join(err, os.RemoveAll(filepath.Join(s.cfg.RecordDir, n.Name())))
		}
	}
	return err
}

// numbers makes command numbers that no command of this sandbox had, also
// under an earlier supervisor: they are reserved on disk, many at a time.
type numbers struct {
	file           string
	last, reserved uint64
	failed         func(error)
}

const numberBlock = 1000

func (n *numbers) next() uint64 {
	if n.last == n.reserved {
		n.reserve()
	}
	n.last++
	return n.last
}

func (n *numbers) reserve() {
	b, err := os.ReadFile(n.file)
	if err == nil {
		var v uint64
		if v, err = strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64); err == nil {
			n.last = max(n.last, v)
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = os.MkdirAll(filepath.Dir(n.file), 0o700)
	}
	n.reserved = n.last + numberBlock
	if err == nil {
		err = writeFile(n.file, []byte(strconv.FormatUint(n.reserved, 10)))
	}
	if err != nil {
		n.failed(err)
	}
}

// removeGroup removes the group of a command that was not started.
func (s *Service) removeGroup(c *command) {
	if err := c.group.remove(); err != nil {
		s.cfg.Log.Error("remove cgroup of a command", "command", c.id, "error", err)
	}
}
