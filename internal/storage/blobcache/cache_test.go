package blobcache

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"log/slog"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

// A stream that reads frame by frame is never ahead by more than a third of what it has read, or the window, and not at all when
// that is little.
func TestStream(t *testing.T) {
	const frames, size = 1000, 256 << 10
	var s stream
	fetched := 0
	for i := range frames {
		from, to := s.advance(i, frames, size, uint64(i+1))
		if from < to {
			if from < fetched {
				t.Fatalf("frame %d fetched twice", from)
			}
			fetched = to
		}
		if from < to && (i+1)*size < minRun {
			t.Fatalf("fetched ahead after %d frames", i+1)
		}
		if over := fetched - (i + 1); over > (i+1)/3+1 || over*size > maxWindow {
			t.Fatalf("after %d frames, %d ahead", i+1, over)
		}
	}
	if fetched < frames-1 {
		t.Errorf("a long sequential read was fetched ahead up to %d of %d", fetched, frames)
	}
	var streams [8]stream
	for i, f := range []int{5, 900, 17, 600, 300, 44, 821, 123, 777} {
		st := pick(streams[:], f, 2)
		if from, to := st.advance(f, frames, size, uint64(i+1)); from != to {
			t.Errorf("a random read of frame %d fetches %d to %d", f, from, to)
		}
	}
}

func TestPlanEviction(t *testing.T) {
	idle := usage{bytes: 10, lastUse: 5, complete: true}
	old := usage{bytes: 10, lastUse: 1, complete: true}
	used := usage{bytes: 10, lastUse: 2, attached: true}
	pinned := usage{bytes: 100, lastUse: 0, attached: true, pinned: true, complete: true}
	for _, tt := range []struct {
		need          int64
		whole, frames []usage
	}{
		{0, nil, nil},
		{5, []usage{old}, nil},
		{15, []usage{old, idle}, nil},
		{25, []usage{old, idle}, []usage{used}},
		{1000, []usage{old, idle}, []usage{used}},
	} {
		whole, frames := planEviction([]usage{idle, used, pinned, old}, tt.need)
		if !reflect.DeepEqual(whole, tt.whole) || !reflect.DeepEqual(frames, tt.frames) {
			t.Errorf("need %d: %v, %v", tt.need, whole, frames)
		}
	}
}

func TestProfileParse(t *testing.T) {
	digest := strings.Repeat("ab", 32)
	good, _ := json.Marshal(profile{profileSchema, []touch{{digest, 0, 4096}}})
	if reads, err := parseProfile(good); err != nil || len(reads) != 1 {
		t.Errorf("%v, %v", reads, err)
	}
	for name, p := range map[string]profile{
		"schema":   {2, nil},
		"digest":   {1, []touch{{"../../x", 0, 1}}},
		"negative": {1, []touch{{digest, -1, 1}}},
		"empty":    {1, []touch{{digest, 0, 0}}},
		"huge":     {1, []touch{{digest, 0, 1 << 62}}},
		"sum":      {1, []touch{{digest, 0, maxRecorded}, {digest, 0, 1}}},
		"many":     {1, make([]touch, maxTouches+1)},
	} {
		b, _ := json.Marshal(p)
		if _, err := parseProfile(b); !errs.Is(err, errs.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzParseProfile(f *testing.F) {
	f.Add([]byte(`{"schema":1,"reads":[{"blob":"` + strings.Repeat("00", 32) + `","off":1,"len":2}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		reads, err := parseProfile(b)
		var sum int64
		for _, r := range reads {
			sum += r.Len
		}
		if err == nil && (sum > maxRecorded || sum < 0) {
			t.Errorf("%d bytes named", sum)
		}
	})
}

func open(t *testing.T, dir string, s blob.Store) *Cache {
	t.Helper()
	c, err := Open(Config{Dir: dir, Store: s, Limit: 64 << 20, ReadTime: 10 * time.Second, RecordTime: 200 * time.Millisecond, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// What one process has cached, the next has, checked again; complete blobs need no store.
func TestReopen(t *testing.T) {
	raw := bytes.Repeat([]byte("some content that repeats. "), 100_000)
	o := Object{Digest: sha256.Sum256(raw), Size: int64(len(raw))}
	s := blob.NewMemory()
	if _, err := blob.PutCompressed(t.Context(), s, blobName(o.Digest), bytes.NewReader(raw), blob.CompressOptions{}); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	read := func(c *Cache, off, n int64) {
		t.Helper()
		p := make([]byte, n)
		if err := c.ReadAt(t.Context(), o.Digest, p, off); err != nil || !bytes.Equal(p, raw[off:off+n]) {
			t.Fatalf("read at %d: %v", off, err)
		}
	}
	c := open(t, dir, s)
	if places, err := c.Attach("l", []Object{o}); err != nil || places[0].Path != "" {
		t.Fatal(places, err)
	}
	read(c, 1000, 5000)
	c.Close()

	c = open(t, dir, s)
	if _, err := c.Attach("l", []Object{o}); err != nil {
		t.Fatal(err)
	}
	read(c, 1000, 5000)
	if n := c.Stats().Fetched; n != 0 {
		t.Errorf("%d bytes fetched again", n)
	}
	if _, err := c.Attach("m", []Object{{Digest: o.Digest, Size: 5}}); !errs.Is(err, errs.Invalid) {
		t.Errorf("another size: %v", err)
	}
	read(c, 0, o.Size)
	for end := time.Now().Add(20 * time.Second); c.Stats().Complete == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not completed")
		}
	}
	c.Close()

	c = open(t, dir, blob.NewMemory())
	places, err := c.Attach("l", []Object{o})
	if err != nil || places[0].Path == "" {
		t.Fatal(places, err)
	}
	if b, err := os.ReadFile(places[0].Path); err != nil || !bytes.Equal(b, raw) {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	read(c, 77, 777)
	c.evict(1 << 40)
	if _, err := os.Stat(places[0].Path); err != nil {
		t.Error("a file that is attached by path was evicted")
	}
	c.Detach("l")
	c.evict(1 << 40)
	if _, err := os.Stat(places[0].Path); !os.IsNotExist(err) || c.Stats().Used != 0 {
		t.Errorf("an unused file was not evicted: %v, %d bytes used", err, c.Stats().Used)
	}
}

func TestRecordsProfile(t *testing.T) {
	raw := bytes.Repeat([]byte("0123456789abcdef"), 100_000)
	o := Object{Digest: sha256.Sum256(raw), Size: int64(len(raw))}
	s := blob.NewMemory()
	if _, err := blob.PutCompressed(t.Context(), s, blobName(o.Digest), bytes.NewReader(raw), blob.CompressOptions{}); err != nil {
		t.Fatal(err)
	}
	layer := o.Digest.String()
	c := open(t, t.TempDir(), s)
	if _, err := c.Attach(layer, []Object{o}); err != nil {
		t.Fatal(err)
	}
	c.Warm(layer, []Object{o})
	name, _ := profileName(layer)
	for end := time.Now().Add(20 * time.Second); ; {
		if err := c.ReadAt(t.Context(), o.Digest, make([]byte, 100), 300_000); err != nil {
			t.Fatal(err)
		}
		b, err := blob.ReadAll(t.Context(), s, name, maxProfile)
		if err == nil {
			reads, err := parseProfile(b)
			if err != nil || len(reads) != 1 || reads[0].Off != 256<<10 {
				t.Errorf("%s: %v", b, err)
			}
			return
		}
		if time.Now().After(end) {
			t.Fatal("no profile was stored")
		}
		time.Sleep(5 * time.Millisecond)
	}
}
