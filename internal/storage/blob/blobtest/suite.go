// Package blobtest has what tests of blob stores and of their users need: the
// conformance suite, and a store that fails as told.
package blobtest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

// Config describes the store under test.
type Config struct {
	// New returns a store without objects. It is called once for each part of the suite.
	New func(t *testing.T) blob.Store
	// Large is the size of the largest object that is stored; 0 means 20 MiB.
	Large int
	// Objects is how many objects the listing has; 0 means 1,200.
	Objects int
}

// Run checks that stores keep the contract of blob.Store.
func Run(t *testing.T, c Config) {
	if c.Large == 0 {
		c.Large = 20 << 20
	}
	if c.Objects == 0 {
		c.Objects = 1200
	}
	for _, part := range []struct {
		name string
		run  func(*suite)
	}{
		{"PutGet", (*suite).putGet},
		{"Ranges", (*suite).ranges},
		{"Missing", (*suite).missing},
		{"Names", (*suite).names},
		{"Large", (*suite).large},
		{"FailedPut", (*suite).failedPut},
		{"Replace", (*suite).replace},
		{"List", (*suite).list},
		{"ListOrder", (*suite).listOrder},
		{"Delete", (*suite).deletes},
		{"Cancel", (*suite).cancel},
		{"Concurrent", (*suite).concurrent},
		{"Sweep", (*suite).sweep},
		{"Seekable", (*suite).seekable},
	} {
		t.Run(part.name, func(t *testing.T) {
			part.run(&suite{T: t, Config: c, s: c.New(t), ctx: t.Context()})
		})
	}
}

type suite struct {
	*testing.T
	Config
	s   blob.Store
	ctx context.Context
}

func (s *suite) put(name string, content []byte) {
	s.Helper()
	if err := s.s.Put(s.ctx, name, bytes.NewReader(content)); err != nil {
		s.Fatalf("Put %s: %v", name, err)
	}
}

func (s *suite) get(name string, off, n int64) ([]byte, error) {
	body, err := s.s.Get(s.ctx, name, off, n)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return io.ReadAll(body)
}

// holds checks what a name has; nil means that it is not there.
func (s *suite) holds(name string, want []byte) {
	s.Helper()
	got, err := s.get(name, 0, -1)
	info, serr := s.s.Stat(s.ctx, name)
	if want == nil {
		if !errs.Is(err, errs.NotFound) || !errs.Is(serr, errs.NotFound) {
			s.Errorf("%s is not absent: Get %v, Stat %v", name, err, serr)
		}
		return
	}
	if err != nil || !bytes.Equal(got, want) {
		s.Errorf("%s has %d bytes, want %d (equal: %v, error %v)", name, len(got), len(want), bytes.Equal(got, want), err)
	}
	if serr != nil || info.Size != int64(len(want)) || info.Name != name {
		s.Errorf("Stat %s: %+v, %v; want size %d", name, info, serr, len(want))
	}
}

// Random returns n bytes that depend on the seed only.
func Random(seed byte, n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b) // never fails
	return b
}

func (s *suite) putGet() {
	before := time.Now().Add(-time.Hour)
	for i, n := range []int{0, 1, 4096, 100_001} {
		name := fmt.Sprintf("blobs/ab/%d", i)
		s.put(name, Random(byte(i), n))
		s.holds(name, Random(byte(i), n))
		if info, err := s.s.Stat(s.ctx, name); err != nil || info.Modified.Before(before) || info.Modified.After(time.Now().Add(time.Hour)) {
			s.Errorf("Stat %s: %+v, %v: the time is not now", name, info, err)
		}
	}
	s.put("top", []byte("no slash"))
	s.holds("top", []byte("no slash"))
	long := "tags/" + strings.Repeat("x", 200) + "/" + strings.Repeat("y", 200)
	s.put(long, []byte("long"))
	s.holds(long, []byte("long"))
}

func (s *suite) ranges() {
	content := Random(1, 50_000)
	s.put("o", content)
	s.put("empty", nil)
	for _, r := range []struct{ off, n, from, to int64 }{
		{0, 0, 0, 0}, {0, 1, 0, 1}, {0, 50_000, 0, 50_000}, {0, 99_999, 0, 50_000}, {10, 100, 10, 110}, {49_999, 1, 49_999, 50_000},
		{49_999, 2, 49_999, 50_000}, {50_000, 1, 0, 0}, {50_000, -1, 0, 0}, {99_999, 5, 0, 0}, {100, -1, 100, 50_000},
		{-1, -1, 49_999, 50_000}, {-100, -1, 49_900, 50_000}, {-50_000, -1, 0, 50_000}, {-99_999, -1, 0, 50_000},
	} {
		got, err := s.get("o", r.off, r.n)
		if err != nil || !bytes.Equal(got, content[r.from:r.to]) {
			s.Errorf("Get %d+%d: %d bytes, %v; want %d to %d", r.off, r.n, len(got), err, r.from, r.to)
		}
		if got, err = s.get("empty", r.off, r.n); err != nil || len(got) != 0 {
			s.Errorf("Get %d+%d of nothing: %d bytes, %v", r.off, r.n, len(got), err)
		}
	}
	if _, err := s.get("o", -5, 2); !errs.Is(err, errs.Invalid) {
		s.Errorf("the last bytes with a length: %v, want invalid", err)
	}
}

func (s *suite) missing() {
	s.holds("nothing/here", nil)
	if _, err := s.get("nothing/here", 5, 5); !errs.Is(err, errs.NotFound) {
		s.Errorf("Get of a range: %v", err)
	}
	if _, err := s.get("nothing/here", 0, 0); !errs.Is(err, errs.NotFound) {
		s.Errorf("Get of nothing: %v", err)
	}
	if err := s.s.Delete(s.ctx, "nothing/here"); err != nil {
		s.Errorf("Delete: %v", err)
	}
	if err := s.s.Delete(s.ctx); err != nil {
		s.Errorf("Delete of none: %v", err)
	}
	if l, err := s.s.List(s.ctx, "", "", 10); err != nil || len(l) != 0 {
		s.Errorf("List: %v, %v", l, err)
	}
	// A directory of names is no object.
	s.put("a/b/c", []byte("x"))
	s.holds("a/b", nil)
	s.holds("a", nil)
	if err := s.s.Delete(s.ctx, "a/b", "a"); err != nil {
		s.Errorf("Delete: %v", err)
	}
	s.holds("a/b/c", []byte("x"))
}

func (s *suite) names() {
	for _, name := range []string{"", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", ".parts/x", "a/.hidden", "a\x00b", "a b", "a\nb",
		"a\\b", "é", "a%2fb", "a?b", "a#b", "a:b", strings.Repeat("x", 256), strings.Repeat("xy/", 250) + "z"} {
		check := func(op string, err error) {
			s.Helper()
			if !errs.Is(err, errs.Invalid) {
				s.Errorf("%s %.40q: %v, want invalid", op, name, err)
			}
		}
		check("Put", s.s.Put(s.ctx, name, strings.NewReader("x")))
		_, err := s.get(name, 0, -1)
		check("Get", err)
		_, err = s.s.Stat(s.ctx, name)
		check("Stat", err)
		check("Delete", s.s.Delete(s.ctx, name))
		if name != "" && name != "a/" {
			_, err = s.s.List(s.ctx, name, "", 1)
			check("List", err)
		}
		if name != "" {
			_, err = s.s.List(s.ctx, "", name, 1)
			check("List after", err)
		}
	}
	for _, limit := range []int{-1, 0, 10_001} {
		if _, err := s.s.List(s.ctx, "", "", limit); !errs.Is(err, errs.Invalid) {
			s.Errorf("List with limit %d: %v", limit, err)
		}
	}
	for _, name := range []string{"A-Z.a_z+0=9@x", "tags/lab+team/a+b/v1.0"} {
		s.put(name, []byte(name))
		s.holds(name, []byte(name))
	}
}

func (s *suite) large() {
	content := Random(3, s.Large)
	// A plain reader: its length is not known.
	if err := s.s.Put(s.ctx, "large", struct{ io.Reader }{bytes.NewReader(content)}); err != nil {
		s.Fatal(err)
	}
	body, err := s.s.Get(s.ctx, "large", 0, -1)
	if err != nil {
		s.Fatal(err)
	}
	defer body.Close()
	h := sha256.New()
	if n, err := io.Copy(h, body); err != nil || n != int64(s.Large) || [32]byte(h.Sum(nil)) != sha256.Sum256(content) {
		s.Errorf("read back %d bytes of %d, %v, or others", n, s.Large, err)
	}
	off := int64(s.Large) * 2 / 3
	if got, err := s.get("large", off, 70_000); err != nil || !bytes.Equal(got, content[off:off+70_000]) {
		s.Errorf("a range of it: %d bytes, %v, or others", len(got), err)
	}
	if got, err := s.get("large", -70_000, -1); err != nil || !bytes.Equal(got, content[s.Large-70_000:]) {
		s.Errorf("the end of it: %d bytes, %v, or others", len(got), err)
	}
}

var errSource = errors.New("the source broke")

type brokenSource struct{}

func (brokenSource) Read([]byte) (int, error) { return 0, errSource }

func (s *suite) failedPut() {
	old := []byte("old")
	s.put("known", old)
	for _, n := range []int{0, 10, 1 << 20, s.Large} {
		for name, want := range map[string][]byte{"known": old, "fresh": nil} {
			err := s.s.Put(s.ctx, name, io.MultiReader(bytes.NewReader(make([]byte, n)), brokenSource{}))
			if !errors.Is(err, errSource) {
				s.Errorf("Put from a source that breaks after %d: %v", n, err)
			}
			s.holds(name, want)
		}
	}
	if l, err := s.s.List(s.ctx, "", "", 10); err != nil || len(l) != 1 {
		s.Errorf("after failed Puts there are %v, %v", l, err)
	}
}

func (s *suite) replace() {
	s.put("o", Random(1, 100_000))
	s.put("o", Random(2, 100))
	s.holds("o", Random(2, 100))
	s.put("o", Random(3, 200_000))
	s.holds("o", Random(3, 200_000))
	// A reader that began before has the old bytes, or an error.
	body, err := s.s.Get(s.ctx, "o", 0, -1)
	if err != nil {
		s.Fatal(err)
	}
	defer body.Close()
	head := make([]byte, 10)
	if _, err := io.ReadFull(body, head); err != nil {
		s.Fatal(err)
	}
	s.put("o", Random(4, 200_000))
	rest, err := io.ReadAll(body)
	if old := Random(3, 200_000); err == nil && !bytes.Equal(append(head, rest...), old) {
		s.Error("a reader saw a mixture of two versions")
	}
	s.holds("o", Random(4, 200_000))
}

func (s *suite) list() {
	var want []string
	var mu sync.Mutex
	work := make(chan string)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for name := range work {
				if err := s.s.Put(s.ctx, name, strings.NewReader(name)); err != nil {
					mu.Lock()
					s.Errorf("Put %s: %v", name, err)
					mu.Unlock()
				}
			}
		})
	}
	for i := range s.Objects {
		name := fmt.Sprintf("blobs/%02x/%06d", i%256, i)
		want = append(want, name)
		work <- name
	}
	work <- "alpha"
	work <- "blobsy"
	work <- "zulu/omega"
	close(work)
	wg.Wait()
	slices.Sort(want)
	for _, limit := range []int{7 + s.Objects/10, 1000, 10_000} {
		var got []string
		after := ""
		for {
			page, err := s.s.List(s.ctx, "blobs/", after, limit)
			if err != nil {
				s.Fatalf("List after %q: %v", after, err)
			}
			for _, o := range page {
				got = append(got, o.Name)
				if o.Size != int64(len(o.Name)) || o.Modified.IsZero() {
					s.Errorf("listed as %+v", o)
				}
			}
			if len(page) > limit {
				s.Errorf("a page of %d has %d", limit, len(page))
			}
			if len(page) < limit {
				break
			}
			after = page[len(page)-1].Name
		}
		if !slices.Equal(got, want) {
			s.Errorf("in pages of %d: %d names, want %d, or in another order", limit, len(got), len(want))
		}
	}
	for prefix, n := range map[string]int{"blobs/07/": (s.Objects + 248) / 256, "blobs/07": (s.Objects + 248) / 256, "blobs": s.Objects + 1, "": s.Objects + 3, "zulu/omega": 1, "zulu/omegas": 0, "y": 0} {
		if l, err := s.s.List(s.ctx, prefix, "", 10_000); err != nil || len(l) != n {
			s.Errorf("List %q: %d, %v; want %d", prefix, len(l), err, n)
		}
	}
	if l, err := s.s.List(s.ctx, "blobs/", want[len(want)-1], 10); err != nil || len(l) != 0 {
		s.Errorf("List after the last: %v, %v", l, err)
	}
	// after need not exist, nor have the prefix.
	if l, err := s.s.List(s.ctx, "blobs/", "alpha", 1); err != nil || len(l) != 1 || l[0].Name != want[0] {
		s.Errorf("List after alpha: %v, %v", l, err)
	}
	if l, err := s.s.List(s.ctx, "blobs/", want[0]+"x", 1); err != nil || len(l) != 1 || l[0].Name != want[1] {
		s.Errorf("List after what is not there: %v, %v", l, err)
	}
}

// listOrder: "-", "." and "+" are before "/", so a walk of directories has another order.
func (s *suite) listOrder() {
	want := []string{"t/a+b/x", "t/a-/x", "t/a-b/x", "t/a.b/x", "t/a/x", "t/a/y", "t/a0/x", "t/aA/x", "t/a_/x", "t/aa"}
	for _, name := range want {
		s.put(name, nil)
	}
	for limit := 1; limit <= len(want)+1; limit++ {
		var got []string
		after := ""
		for {
			page, err := s.s.List(s.ctx, "t/", after, limit)
			if err != nil {
				s.Fatal(err)
			}
			for _, o := range page {
				got = append(got, o.Name)
			}
			if len(page) < limit || len(got) > 2*len(want) {
				break
			}
			after = page[len(page)-1].Name
		}
		if !slices.Equal(got, want) {
			s.Fatalf("in pages of %d: %q", limit, got)
		}
	}
	if l, err := s.s.List(s.ctx, "t/a", "", 100); err != nil || len(l) != len(want) {
		s.Errorf("List t/a: %v, %v", l, err)
	}
}

func (s *suite) deletes() {
	var names []string
	for i := range 30 {
		names = append(names, fmt.Sprintf("d/%d/o", i))
		s.put(names[i], []byte("x"))
	}
	if err := s.s.Delete(s.ctx, append(names[:20:20], "d/missing")...); err != nil {
		s.Fatal(err)
	}
	for i, name := range names {
		if i < 20 {
			s.holds(name, nil)
		} else {
			s.holds(name, []byte("x"))
		}
	}
	if l, err := s.s.List(s.ctx, "d/", "", 100); err != nil || len(l) != 10 {
		s.Errorf("%d are left, %v; want 10", len(l), err)
	}
	s.put(names[0], []byte("again"))
	s.holds(names[0], []byte("again"))
	// What was a directory may become an object once it is empty.
	if err := s.s.Delete(s.ctx, names...); err != nil {
		s.Fatal(err)
	}
	s.put("d/1", []byte("y"))
	s.holds("d/1", []byte("y"))
}

func (s *suite) cancel() {
	s.put("o", Random(1, 4<<20))
	ctx, cancel := context.WithCancel(s.ctx)
	body, err := s.s.Get(ctx, "o", 0, -1)
	if err != nil {
		s.Fatal(err)
	}
	defer body.Close()
	cancel()
	if _, err := io.ReadAll(body); err == nil {
		s.Log("the body was read before the context ended") // allowed only when it was buffered
		s.Fail()
	}
	err = s.s.Put(ctx, "new", bytes.NewReader(Random(1, 1<<20)))
	_, gerr := s.s.Get(ctx, "o", 0, -1)
	_, serr := s.s.Stat(ctx, "o")
	_, lerr := s.s.List(ctx, "", "", 1)
	for op, err := range map[string]error{"Put": err, "Get": gerr, "Stat": serr, "List": lerr, "Delete": s.s.Delete(ctx, "o")} {
		if !errs.Is(err, errs.Cancelled) {
			s.Errorf("%s with a cancelled context: %v", op, err)
		}
	}
	s.holds("new", nil)
	s.holds("o", Random(1, 4<<20))
}

// concurrent has writers, readers and a deleter of the same names: whatever is read is whole.
func (s *suite) concurrent() {
	var wg sync.WaitGroup
	const size = 300_000
	versions := make([][]byte, 4)
	for i := range versions {
		versions[i] = Random(byte(i), size)
		copy(versions[i], []byte{byte(i)})
	}
	for w := range versions {
		wg.Go(func() {
			for range 10 {
				// A server may refuse a put for the moment: versitygw does when a deletion
				// takes the directory from under it (409). Callers repeat that.
				var err error
				for range 5 {
					if err = s.s.Put(s.ctx, "c/d/o", bytes.NewReader(versions[w])); !blob.Transient(err) {
						break
					}
				}
				if err != nil {
					s.Errorf("Put: %v", err)
				}
			}
		})
	}
	for range 4 {
		wg.Go(func() {
			for range 20 {
				b, err := s.get("c/d/o", 0, -1)
				if errs.Is(err, errs.NotFound) || errs.Is(err, errs.Internal) {
					continue
				}
				if err != nil || len(b) != size || !bytes.Equal(b, versions[b[0]&3]) {
					s.Errorf("Get: %d bytes, %v: not one of the versions", len(b), err)
				}
			}
		})
	}
	wg.Go(func() {
		for range 10 {
			if err := s.s.Delete(s.ctx, "c/d/o"); err != nil {
				s.Errorf("Delete: %v", err)
			}
		}
	})
	wg.Wait()
	s.put("c/d/o", versions[0])
	s.holds("c/d/o", versions[0])
}

func (s *suite) sweep() {
	w, ok := s.s.(blob.Sweeper)
	if !ok {
		s.Skip("the store leaves nothing behind")
	}
	s.put("o", []byte("x"))
	if _, err := w.Sweep(s.ctx, time.Now().Add(time.Hour)); err != nil {
		s.Fatal(err)
	}
	s.holds("o", []byte("x"))
	if n, err := w.Sweep(s.ctx, time.Now().Add(time.Hour)); err != nil || n != 0 {
		s.Errorf("after a sweep there were %d parts, %v", n, err)
	}
}

func (s *suite) seekable() {
	raw := slices.Concat(Random(5, 3<<20), make([]byte, 1<<20), bytes.Repeat([]byte("text "), 200_000))
	want := blob.Sum(sha256.Sum256(raw))
	x, err := blob.PutCompressed(s.ctx, s.s, "blobs/"+want.String(), bytes.NewReader(raw), blob.CompressOptions{Want: &want})
	if err != nil {
		s.Fatal(err)
	}
	if info, err := s.s.Stat(s.ctx, "blobs/"+want.String()); err != nil || info.Size != x.StoredSize() {
		s.Errorf("it has %d bytes, %v; want %d", info.Size, err, x.StoredSize())
	}
	r, err := blob.OpenReader(s.ctx, s.s, "blobs/"+want.String(), int64(len(raw)))
	if err != nil {
		s.Fatal(err)
	}
	defer r.Close()
	for _, off := range []int{0, 1_000_000, 3<<20 - 5, len(raw) - 100} {
		p := make([]byte, 100)
		if _, err := r.ReadAt(p, int64(off)); err != nil || !bytes.Equal(p, raw[off:off+100]) {
			s.Errorf("ReadAt %d: %v, or other bytes", off, err)
		}
	}
}
