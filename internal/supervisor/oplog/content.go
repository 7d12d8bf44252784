package oplog

import (
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"os"
	"path/filepath"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

const (
	spoolExt     = ".part"
	sandboxEnded = "the sandbox has ended"
)

func (l *Log) contentFile(sum string) string {
	return filepath.Join(l.cfg.Dir, contents, filepath.Base(sum))
}

// Content keeps b, which the caller does not change afterwards; nil for nothing.
func (l *Log) Content(b []byte) *harenav1.LogBytes {
	if l == nil || len(b) == 0 {
		return nil
	}
	s := l.Spool()
	_, _ = s.Write(b) // never fails
	return s.Finish()
}

// Spool keeps content as it comes.
type Spool struct {
	l       *Log
	sum     hash.Hash
	size    int64
	head    []byte   // all of it, while it fits inline
	file    *os.File // what came so far, when it does not
	dropped bool
}

// Spool begins to keep content. The caller ends it with Finish or Discard.
func (l *Log) Spool() *Spool { return &Spool{l: l, sum: sha256.New()} }

// Write implements io.Writer. It never fails: what cannot be kept is only counted.
func (s *Spool) Write(p []byte) (int, error) {
	s.sum.Write(p)
	s.size += int64(len(p))
	switch {
	case s.l == nil || s.dropped:
	case s.size <= Inline:
		s.head = append(s.head, p...)
	default:
		s.keep(p)
	}
	return len(p), nil
}

// keep appends p to the file.
func (s *Spool) keep(p []byte) {
	l := s.l
	if s.size > l.cfg.Limits.One {
		s.drop()
		return
	}
	if s.file == nil {
		dir := filepath.Join(l.cfg.Dir, contents)
		err := os.MkdirAll(dir, 0o700)
		if err == nil {
			s.file, err = os.CreateTemp(dir, "*"+spoolExt)
		}
		if err != nil {
			l.cfg.Log.Warn("content is not logged", "error", err)
			s.dropped = true
			return
		}
		p = append(s.head, p...)
		s.head = nil
	}
	if !l.reserve(int64(len(p))) {
		s.drop()
		return
	}
	if _, err := s.file.Write(p); err != nil {
		l.cfg.Log.Warn("content is not logged", "error", err)
		l.reserve(-int64(len(p)))
		s.drop()
	}
}

// reserve takes n bytes of the room for content; negative n gives back.
func (l *Log) reserve(n int64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n > 0 && (l.stopped != "" || l.content+n > l.cfg.Limits.Content) {
		return false
	}
	l.content += n
	return true
}

func (s *Spool) drop() {
	s.dropped, s.head = true, nil
	s.remove()
}

// remove gives back what the file holds.
func (s *Spool) remove() {
	if s.file == nil {
		return
	}
	if info, err := s.file.Stat(); err == nil {
		s.l.reserve(-info.Size())
	}
	name := s.file.Name()
	s.file.Close()
	if err := os.Remove(name); err != nil {
		s.l.cfg.Log.Warn("remove content that is not logged", "error", err)
	}
	s.file = nil
}

// Discard forgets what was kept.
func (s *Spool) Discard() {
	if s.l != nil {
		s.drop()
	}
}

// Sum is the digest of all that came, hexadecimal.
func (s *Spool) Sum() string { return hex.EncodeToString(s.sum.Sum(nil)) }

// Finish returns what stands for the content in an entry.
func (s *Spool) Finish() *harenav1.LogBytes {
	b := &harenav1.LogBytes{Size: s.size, Sha256: s.Sum(), Inline: s.head, Dropped: s.dropped}
	switch {
	case s.l == nil:
		b.Dropped = s.size > 0
	case s.file != nil:
		s.publish(b)
	case !s.dropped:
		b.Sha256 = "" // it is all there
	}
	return b
}

func (s *Spool) publish(b *harenav1.LogBytes) {
	to := s.l.contentFile(b.GetSha256())
	if _, err := os.Stat(to); err == nil {
		s.remove() // the same content was logged before
		return
	}
	err := s.file.Close()
	if err == nil {
		err = os.Rename(s.file.Name(), to)
	}
	if err != nil {
		s.l.cfg.Log.Warn("content is not logged", "error", err)
		b.Dropped = true
	}
	s.file = nil
	if err == nil {
		s.l.owes(to, filepath.Dir(to))
	}
}
