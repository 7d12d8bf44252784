package blob_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
	"github.com/harena-dev/harena/internal/storage/blob/blobtest"
)

var quick = blob.RetryPolicy{Attempts: 4, First: time.Microsecond, Longest: time.Millisecond}

func TestDecoratedKeepTheContract(t *testing.T) {
	blobtest.Run(t, blobtest.Config{New: func(*testing.T) blob.Store {
		s := blob.WithMetrics(blobtest.NewFaulty(blob.NewMemory()), new(blob.Metrics))
		return blob.WithRetry(blob.WithLimit(s, blob.Limits{BytesPerSecond: 1 << 40, RequestsPerSecond: 1e9}), quick)
	}})
}

func TestRetry(t *testing.T) {
	ctx := context.Background()
	content := blobtest.Random(1, 300_000)
	fresh := func() (*blobtest.Faulty, blob.Store) {
		m := blob.NewMemory()
		if err := m.Put(ctx, "o", bytes.NewReader(content)); err != nil {
			t.Fatal(err)
		}
		f := blobtest.NewFaulty(m)
		return f, blob.WithRetry(f, quick)
	}
	read := func(s blob.Store, off, n int64) ([]byte, error) {
		r, err := s.Get(ctx, "o", off, n)
		if err != nil {
			return nil, err
		}
		defer r.Close()
		return io.ReadAll(r)
	}

	t.Run("passing faults", func(t *testing.T) {
		for _, op := range []blobtest.Op{blobtest.Put, blobtest.Get, blobtest.Stat, blobtest.List, blobtest.Delete} {
			f, s := fresh()
			f.Fail(op, 1, nil)
			f.Fail(op, 2, errs.E(errs.Capacity, "slow down"))
			f.Fail(op, 3, errs.E(errs.Timeout, "late"))
			if err := call(ctx, s, op); err != nil || f.Calls(op) != 4 {
				t.Errorf("%s: %v after %d calls", op, err, f.Calls(op))
			}
			f, s = fresh()
			f.Outage(true)
			if err := call(ctx, s, op); !errs.Is(err, errs.Internal) || f.Calls(op) != 4 {
				t.Errorf("%s in an outage: %v after %d calls", op, err, f.Calls(op))
			}
			for _, kind := range []errs.Kind{errs.NotFound, errs.Invalid, errs.Denied, errs.Unauthenticated, errs.Precondition, errs.Cancelled} {
				f, s = fresh()
				f.Fail(op, 1, errs.E(kind, "for good"))
				if err := call(ctx, s, op); !errs.Is(err, kind) || f.Calls(op) != 1 {
					t.Errorf("%s with %s: %v after %d calls", op, kind, err, f.Calls(op))
				}
			}
		}
	})
	t.Run("bodies go on", func(t *testing.T) {
		for _, r := range []struct{ off, n, from, to int64 }{
			{0, -1, 0, 300_000}, {1000, -1, 1000, 300_000}, {1000, 250_000, 1000, 251_000}, {1000, 900_000, 1000, 300_000},
			{-250_000, -1, 50_000, 300_000}, {-900_000, -1, 0, 300_000},
		} {
			f, s := fresh()
			for i, after := range []int64{0, 10, 100_000, 1, 0, 0, 70_000} {
				f.Break(blobtest.Get, i+1, after, nil)
			}
			got, err := read(s, r.off, r.n)
			if err != nil || !bytes.Equal(got, content[r.from:r.to]) {
				t.Errorf("Get %d+%d: %d bytes, %v, or others", r.off, r.n, len(got), err)
			}
			if f.Bytes() != r.to-r.from {
				t.Errorf("Get %d+%d moved %d bytes for %d", r.off, r.n, f.Bytes(), r.to-r.from)
			}
		}
	})
	t.Run("bodies without progress end", func(t *testing.T) {
		f, s := fresh()
		for i := range 10 {
			f.Break(blobtest.Get, i+1, int64(max(0, 10-10*i)), nil)
		}
		if got, err := read(s, 0, -1); !errs.Is(err, errs.Internal) || len(got) != 10 || f.Calls(blobtest.Get) != 4 {
			t.Errorf("%d bytes, %v after %d calls", len(got), err, f.Calls(blobtest.Get))
		}
	})
	t.Run("never a mixture", func(t *testing.T) {
		f, s := fresh()
		f.Break(blobtest.Get, 1, 1000, nil)
		r, err := s.Get(ctx, "o", 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		if _, err := io.ReadFull(r, make([]byte, 500)); err != nil {
			t.Fatal(err)
		}
		if err := s.Put(ctx, "o", bytes.NewReader(blobtest.Random(2, 300_000))); err != nil {
			t.Fatal(err)
		}
		if rest, err := io.ReadAll(r); !errs.Is(err, errs.Precondition) {
			t.Errorf("%d bytes more, %v", len(rest), err)
		}
	})
	t.Run("sources", func(t *testing.T) {
		f, s := fresh()
		f.Break(blobtest.Put, 1, 100_000, nil)
		src := bytes.NewReader(content)
		src.Seek(1000, io.SeekStart)
		if err := s.Put(ctx, "p", src); err != nil {
			t.Errorf("a source that can be rewound: %v", err)
		}
		if b, err := blob.ReadAll(ctx, s, "p", 1<<20); err != nil || !bytes.Equal(b, content[1000:]) {
			t.Errorf("%d bytes, %v, or others", len(b), err)
		}
		f.Break(blobtest.Put, 1, 100_000, nil)
		if err := s.Put(ctx, "q", struct{ io.Reader }{bytes.NewReader(content)}); err == nil {
			t.Error("a source that cannot be rewound was taken to be whole")
		}
	})
	t.Run("contexts", func(t *testing.T) {
		f, s := fresh()
		f.Hang(true)
		ctx, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		for _, op := range []blobtest.Op{blobtest.Put, blobtest.Get, blobtest.Stat, blobtest.List, blobtest.Delete} {
			if err := call(ctx, s, op); !errs.Is(err, errs.Timeout) {
				t.Errorf("%s: %v", op, err)
			}
		}
		f.Hang(false)
		if err := call(context.Background(), s, blobtest.Get); err != nil {
			t.Errorf("after the hang: %v", err)
		}
	})
}

func call(ctx context.Context, s blob.Store, op blobtest.Op) error {
	var err error
	switch op {
	case blobtest.Put:
		err = s.Put(ctx, "new", strings.NewReader("x"))
	case blobtest.Get:
		var r io.ReadCloser
		if r, err = s.Get(ctx, "o", 0, -1); err == nil {
			r.Close()
		}
	case blobtest.Stat:
		_, err = s.Stat(ctx, "o")
	case blobtest.List:
		_, err = s.List(ctx, "", "", 10)
	case blobtest.Delete:
		err = s.Delete(ctx, "o")
	}
	return err
}

func TestMetrics(t *testing.T) {
	ctx := context.Background()
	var m blob.Metrics
	f := blobtest.NewFaulty(blob.NewMemory())
	s := blob.WithRetry(blob.WithMetrics(f, &m), quick)
	f.Fail(blobtest.Put, 1, nil)
	if err := s.Put(ctx, "o", bytes.NewReader(make([]byte, 1000))); err != nil {
		t.Fatal(err)
	}
	r, err := s.Get(ctx, "o", 100, 500)
	if err != nil {
		t.Fatal(err)
	}
	if got := m.Stats().Get; got.Running != 1 || got.Requests != 1 {
		t.Errorf("while a body is open: %+v", got)
	}
	if _, err := io.Copy(io.Discard, r); err != nil {
		t.Fatal(err)
	}
	r.Close()
	r.Close()
	_, _ = s.Stat(ctx, "missing")
	got := m.Stats()
	if got.Put.Requests != 2 || got.Put.Failures != 1 || got.Put.Bytes != 1000 {
		t.Errorf("put: %+v", got.Put)
	}
	if got.Get.Requests != 1 || got.Get.Bytes != 500 || got.Get.Running != 0 || got.Get.Failures != 0 {
		t.Errorf("get: %+v", got.Get)
	}
	if got.Stat.Requests != 1 || got.Stat.Failures != 0 || got.List.Requests != 0 {
		t.Errorf("stat: %+v, list: %+v", got.Stat, got.List)
	}
}

// The bound on time is one-sided: limits delay, and machines only add to it.
func TestLimit(t *testing.T) {
	ctx := context.Background()
	s := blob.WithLimit(blob.NewMemory(), blob.Limits{BytesPerSecond: 10 << 20, RequestsPerSecond: 50})
	start := time.Now()
	if err := s.Put(ctx, "o", bytes.NewReader(make([]byte, 4<<20))); err != nil {
		t.Fatal(err)
	}
	if d := time.Since(start); d < 200*time.Millisecond {
		t.Errorf("4 MiB at 10 MiB/s took %v", d)
	}
	start = time.Now()
	for range 20 {
		if _, err := s.Stat(ctx, "o"); err != nil {
			t.Fatal(err)
		}
	}
	if d := time.Since(start); d < 200*time.Millisecond {
		t.Errorf("20 requests at 50 a second took %v", d)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	if err := s.Put(ctx, "p", bytes.NewReader(make([]byte, 100<<20))); !errs.Is(err, errs.Timeout) {
		t.Errorf("a call that would wait for longer than its context lasts: %v", err)
	}
}

func TestOpenURLs(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for url, kind := range map[string]errs.Kind{
		"file://" + dir:       "",
		"file://" + dir + "/": "",
		"s3://bucket":         "",
		"s3://bucket/a/b?endpoint=localhost:9000":            "",
		"s3://bucket?endpoint=http://[::1]:9000/&region=x-1": "",
		"":                                  errs.Invalid,
		dir:                                 errs.Invalid,
		"http://host/x":                     errs.Invalid,
		"file://host" + dir:                 errs.Invalid,
		"file://" + dir + "?x=y":            errs.Invalid,
		"file://relative":                   errs.Invalid,
		"file://" + file:                    errs.Invalid,
		"file://" + dir + "/missing":        errs.NotFound,
		"s3://":                             errs.Invalid,
		"s3://UPPER":                        errs.Invalid,
		"s3://bucket/../x":                  errs.Invalid,
		"s3://bucket/a//b":                  errs.Invalid,
		"s3://user:secret@bucket":           errs.Invalid,
		"s3://bucket?endpoint=ftp://x":      errs.Invalid,
		"s3://bucket?endpoint=a&endpoint=b": errs.Invalid,
		"s3://bucket?regoin=x":              errs.Invalid,
		"s3://bucket?region=X%20Y":          errs.Invalid,
		"s3://bucket#x":                     errs.Invalid,
		"s3://%zz":                          errs.Invalid,
	} {
		_, err := blob.Open(context.Background(), url, blob.Options{})
		if errs.KindOf(err) != kind {
			t.Errorf("Open %q: %v, want kind %q", url, err, kind)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("Open %q: the error shows the password: %v", url, err)
		}
	}
}

func TestCredentials(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", "")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "")
	file := filepath.Join(t.TempDir(), "store.json")
	for _, test := range []struct {
		name, content string
		mode          os.FileMode
		kind          errs.Kind
	}{
		{"missing", "", 0, errs.Unauthenticated},
		{"open to others", `{"access_key":"a","secret_key":"b"}`, 0o640, errs.Precondition},
		{"not JSON", `{`, 0o600, errs.Invalid},
		{"empty", `{}`, 0o600, errs.Invalid},
		{"good", `{"access_key":"a","secret_key":"b"}`, 0o600, ""},
	} {
		if test.mode != 0 {
			os.Remove(file)
			if err := errors.Join(os.WriteFile(file, []byte(test.content), test.mode), os.Chmod(file, test.mode)); err != nil {
				t.Fatal(err)
			}
		}
		c, err := blob.LoadCredentials(file)
		if errs.KindOf(err) != test.kind {
			t.Errorf("%s: %v, want kind %q", test.name, err, test.kind)
		}
		if err == nil && (c.AccessKey != "a" || c.SecretKey != "b") {
			t.Errorf("%s: %+v", test.name, c)
		}
	}
	t.Setenv("AWS_ACCESS_KEY_ID", "env")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "env")
	if c, err := blob.LoadCredentials(file); err != nil || c.AccessKey != "env" {
		t.Errorf("the environment: %+v, %v", c, err)
	}
}
