package layer

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/harena-dev/harena/internal/errs"
)

// The index on disk is a log of lines "CRC RECORD", CRC-32C in hexadecimal:
//
//	I 1                                          first line: the version
//	t TREE PROJECT NAME:TAG                      this name is about to change
//	T TREE PROJECT NAME:TAG DIGEST|-             it points there now, or is gone
//	l DIGEST                                     this manifest is about to come or go
//	L DIGEST KIND OBJECT,… PARENT,… BLOB=BYTES,…  it is there; "-" for an empty list or an unknown kind
//	G DIGEST                                     it is gone
//
// What is about to change is on disk, durably, before it does. So the log can lack
// the outcome of a change but never that there was one: what it leaves open is
// looked up in the files when the log is read. A line that is not whole, or says
// what it cannot say, makes the whole log worthless, and it is made anew.

const indexHeader = "I 1"

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

type indexLog struct {
	f     *os.File
	lines int // in the file
	live  int // that a new file would have
}

func tagIntent(t tree, r Ref) string {
	return "t " + string(t) + " " + r.Project + " " + r.String()
}

func tagRecord(t tree, r Ref, d Digest) string { return nameRecord(t, r.Project, r.String(), d) }

func nameRecord(t tree, project, name string, d Digest) string {
	to := "-"
	if d != "" {
		to = d.Hex()
	}
	return "T " + string(t) + " " + project + " " + name + " " + to
}

func layerIntent(d Digest) string { return "l " + d.Hex() }
func layerGone(d Digest) string   { return "G " + d.Hex() }

func layerRecord(d sum, s *summary) string {
	kind := string(s.kind)
	if kind == "" {
		kind = "-"
	}
	return "L " + d.digest().Hex() + " " + kind + " " + joinSums(s.objects) + " " + joinSums(s.parents) + " " + joinUses(s.extra)
}

func joinUses(uses []extraUse) string {
	if len(uses) == 0 {
		return "-"
	}
	parts := make([]string, len(uses))
	for i, u := range uses {
		parts[i] = u.blob.digest().Hex() + "=" + strconv.FormatInt(u.bytes, 10)
	}
	return strings.Join(parts, ",")
}

func parseUses(list string) ([]extraUse, bool) {
	if list == "-" {
		return nil, true
	}
	var out []extraUse
	for part := range strings.SplitSeq(list, ",") {
		hex, count, _ := strings.Cut(part, "=")
		d, ok := parseSum(hex)
		n, err := strconv.ParseInt(count, 10, 64)
		if !ok || err != nil || n < 0 {
			return nil, false
		}
		out = append(out, extraUse{d, n})
	}
	return out, true
}

func joinSums(ds []sum) string {
	if len(ds) == 0 {
		return "-"
	}
	var b strings.Builder
	for i, d := range ds {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(d.digest().Hex())
	}
	return b.String()
}

func frame(b *bytes.Buffer, record string) {
	fmt.Fprintf(b, "%08x %s\n", crc32.Checksum([]byte(record), castagnoli), record)
}

// openIndexLog opens a log for appending; nil when there is none.
func openIndexLog(path string) (*indexLog, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_APPEND, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return &indexLog{f: f}, nil
}

// append writes records; those that announce a change are durable when it returns.
func (l *indexLog) append(records ...string) error {
	if len(records) == 0 {
		return nil
	}
	var b bytes.Buffer
	for _, r := range records {
		frame(&b, r)
	}
	if _, err := l.f.Write(b.Bytes()); err != nil {
		return err
	}
	l.lines += len(records)
	if c := records[0][0]; c == 't' || c == 'l' {
		return l.f.Sync()
	}
	return nil
}

func (l *indexLog) remove() {
	_ = os.Remove(l.f.Name()) // one that stays is torn, or says that it does not know
	l.f.Close()
}

// bloated: more than half of a log of some size is history.
func (l *indexLog) bloated() bool { return l.lines > 3*l.live+10_000 }

// errTorn: the log does not tell what it should.
var errTorn = errors.New("the index of layers is torn")

// replay fills x from its log.
func (s *Store) replay(x *index) error {
	if _, err := x.log.f.Seek(0, 0); err != nil {
		return err
	}
	b := newIndexBuilder(x)
	openNames, openLayers := make(map[string]bool), make(map[sum]bool)
	x.log.lines = 0
	r := bufio.NewReaderSize(x.log.f, 1<<20)
	for {
		line, err := r.ReadSlice('\n')
		if len(line) == 0 && err != nil {
			break
		}
		record, ok := unframe(line)
		if !ok {
			return errTorn
		}
		x.log.lines++
		if x.log.lines == 1 {
			if record != indexHeader {
				return errTorn
			}
			continue
		}
		if !b.apply(record, openNames, openLayers) {
			return errTorn
		}
	}
	if x.log.lines == 0 {
		return errTorn
	}
	if err := s.settle(b, openNames, openLayers); err != nil {
		return err
	}
	b.finish()
	x.log.live = x.size()
	return nil
}

// size counts the lines of a log without history.
func (x *index) size() int {
	n := 1 + len(x.layers)
	for _, p := range x.projects {
		n += len(p.order)
	}
	return n
}

func unframe(line []byte) (string, bool) {
	if len(line) < 10 || line[8] != ' ' || line[len(line)-1] != '\n' {
		return "", false
	}
	want, err := strconv.ParseUint(string(line[:8]), 16, 32)
	record := line[9 : len(line)-1]
	return string(record), err == nil && crc32.Checksum(record, castagnoli) == uint32(want)
}

// apply does what a record says; false when it cannot be one.
func (b *indexBuilder) apply(record string, openNames map[string]bool, openLayers map[sum]bool) bool {
	f := strings.Split(record, " ")
	switch {
	case f[0] == "t" && len(f) == 4:
		openNames[record[2:]] = true
	case f[0] == "T" && len(f) == 5 && len(f[1]) == 1:
		var d sum
		ok := f[4] == "-"
		if !ok {
			d, ok = parseSum(f[4])
		}
		if !ok {
			return false
		}
		delete(openNames, strings.Join(f[1:4], " "))
		b.name(tree(f[1][0]), f[2], f[3], d)
	case f[0] == "l" && len(f) == 2:
		d, ok := parseSum(f[1])
		if !ok {
			return false
		}
		openLayers[d] = true
	case f[0] == "G" && len(f) == 2:
		d, ok := parseSum(f[1])
		if !ok {
			return false
		}
		delete(openLayers, d)
		b.x.removeLayer(d)
	case f[0] == "L" && len(f) == 6:
		d, ok1 := parseSum(f[1])
		objects, ok2 := parseSums(f[3])
		parents, ok3 := parseSums(f[4])
		extra, ok4 := parseUses(f[5])
		if !ok1 || !ok2 || !ok3 || !ok4 {
			return false
		}
		delete(openLayers, d)
		sm := &summary{objects: objects, parents: parents, extra: extra}
		if f[2] != "-" {
			sm.kind = Kind(f[2])
		}
		b.layer(d, sm)
	default:
		return false
	}
	return true
}

func parseSum(hex string) (sum, bool) {
	if !hexPattern.MatchString(hex) {
		return sum{}, false
	}
	return sumOf(Digest(digestPrefix + hex)), true
}

func parseSums(list string) ([]sum, bool) {
	if list == "-" {
		return nil, true
	}
	parts := strings.Split(list, ",")
	out := make([]sum, 0, len(parts))
	for _, p := range parts {
		d, ok := parseSum(p)
		if !ok {
			return nil, false
		}
		out = append(out, d)
	}
	return out, true
}

// settle looks up what the log leaves open.
func (s *Store) settle(b *indexBuilder, names map[string]bool, layers map[sum]bool) error {
	for n := range names {
		f := strings.Split(n, " ")
		r, err := parseName(f[1], f[2])
		if err != nil {
			return err
		}
		d, err := s.readTagFile(tree(f[0][0]), r)
		var to sum
		switch {
		case err == nil:
			to = sumOf(d)
		case !errs.Is(err, errs.NotFound):
			return err
		}
		b.name(tree(f[0][0]), r.Project, r.String(), to)
	}
	for d := range layers {
		l, err := s.readManifest(d.digest())
		switch {
		case err == nil:
			b.layer(d, summarize(&l.Manifest))
		case errors.Is(err, fs.ErrNotExist):
			b.x.removeLayer(d)
		default:
			b.layer(d, &summary{})
		}
	}
	return nil
}

// rewriteIndex puts a log without history in the place of the present one. The
// index in memory is good without it, so a failure costs the next start only.
func (s *Store) rewriteIndex() {
	x := &s.index
	if x.log != nil {
		x.log.f.Close()
		x.log = nil
	}
	if err := s.writeIndex(); err != nil {
		_ = os.Remove(s.catalogPath())
		return
	}
	log, err := openIndexLog(s.catalogPath())
	if err != nil || log == nil {
		_ = os.Remove(s.catalogPath())
		return
	}
	log.lines = x.size()
	log.live = log.lines
	x.log = log
}

func (s *Store) writeIndex() error {
	x := &s.index
	f, err := os.CreateTemp(s.tmp(), "index-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	w := bufio.NewWriterSize(f, 1<<20)
	var b bytes.Buffer
	write := func(record string) error {
		b.Reset()
		frame(&b, record)
		_, err := w.Write(b.Bytes())
		return err
	}
	if err := write(indexHeader); err != nil {
		return err
	}
	for d, sm := range x.layers {
		if err := write(layerRecord(d, sm)); err != nil {
			return err
		}
	}
	for project, p := range x.projects {
		for _, e := range p.order {
			for _, part := range []struct {
				t tree
				d sum
			}{{ownTree, e.own}, {sharedTree, e.shared}} {
				if part.d == (sum{}) {
					continue
				}
				if err := write(nameRecord(part.t, project, e.name, part.d.digest())); err != nil {
					return err
				}
			}
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	return publish(f.Name(), s.catalogPath())
}
