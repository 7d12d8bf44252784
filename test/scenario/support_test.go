package scenario

import (
	"archive/tar"
	"bytes"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// importTar makes a layer of the given files and points name at it.
func importTar(t *testing.T, name, layerKind string, files map[string]string) {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for path, content := range files {
		if err := w.WriteHeader(&tar.Header{Name: path, Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(content)), ModTime: time.Unix(1, 0)}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	postLayer(t, name, layerKind, &buf)
}

func postLayer(t *testing.T, name, layerKind string, archive io.Reader) {
	t.Helper()
	q := url.Values{"name": {name}, "kind": {layerKind}}
	req, err := http.NewRequestWithContext(within(t, 2*time.Minute), http.MethodPost, the.url+"/v1/layers?"+q.Encode(), archive)
	if err != nil {
		t.Fatal(err)
	}
	res, err := the.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if body, _ := io.ReadAll(res.Body); res.StatusCode != http.StatusOK {
		t.Fatalf("import %s: %s %s", name, res.Status, body)
	}
}

// treeSize is what a directory takes on disk.
func treeSize(t *testing.T, dir string) int64 {
	t.Helper()
	var sum int64
	// What goes away while it is walked does not count; a root that is gone has no size.
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil {
			if info, ierr := d.Info(); ierr == nil {
				if st, ok := info.Sys().(*syscall.Stat_t); ok {
					sum += st.Blocks * 512
				}
			}
		}
		return nil //nolint:nilerr // see above
	})
	return sum
}

// importTarLinks makes a toolkit that has symlinks where a launcher expects directories.
func importTarLinks(t *testing.T, name string, links ...map[string]string) {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, set := range links {
		for path, target := range set {
			if err := w.WriteHeader(&tar.Header{Name: path, Linkname: target, Typeflag: tar.TypeSymlink, Mode: 0o777, ModTime: time.Unix(1, 0)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	postLayer(t, name, "toolkit", &buf)
}
