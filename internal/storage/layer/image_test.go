package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	gtar "github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/erofs/erofstest"
	"github.com/harena-dev/harena/internal/storage/oci"
)

type tarEntry struct {
	h       tar.Header
	content string
}

func tarLayer(t testing.TB, entries []tarEntry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := e.h
		h.Size, h.Format = int64(len(e.content)), tar.FormatPAX
		if err := w.WriteHeader(&h); err != nil {
			t.Fatalf("%s: %v", h.Name, err)
		}
		if _, err := io.WriteString(w, e.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// stored is a layer of an image whose bytes are given.
type storedLayer struct {
	v1.Layer
	diff v1.Hash
}

func (s storedLayer) DiffID() (v1.Hash, error) { return s.diff, nil }

// imageOf makes an image of tars, compressed in turn with nothing, gzip and zstd.
func imageOf(t testing.TB, tars [][]byte, config v1.Config) v1.Image {
	t.Helper()
	img := empty.Image
	for i, raw := range tars {
		b, mt := raw, types.OCIUncompressedLayer
		var z bytes.Buffer
		switch i % 3 {
		case 1:
			w := gzip.NewWriter(&z)
			_, _ = w.Write(raw)
			_ = w.Close()
			b, mt = z.Bytes(), types.DockerLayer
		case 2:
			w, err := zstd.NewWriter(&z)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = w.Write(raw)
			_ = w.Close()
			b, mt = z.Bytes(), types.OCILayerZStd
		}
		diff, _, err := v1.SHA256(bytes.NewReader(raw))
		if err != nil {
			t.Fatal(err)
		}
		if img, err = mutate.Append(img, mutate.Addendum{Layer: storedLayer{static.NewLayer(b, mt), diff}, MediaType: mt}); err != nil {
			t.Fatal(err)
		}
	}
	file, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	file = file.DeepCopy()
	file.OS, file.Architecture, file.Config = "linux", runtime.GOARCH, config
	if img, err = mutate.ConfigFile(img, file); err != nil {
		t.Fatal(err)
	}
	return img
}

// layoutTar packs an image as an OCI layout.
func layoutTar(t testing.TB, img v1.Image, options ...layout.Option) []byte {
	t.Helper()
	dir := t.TempDir()
	p, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.AppendImage(img, options...); err != nil {
		t.Fatal(err)
	}
	return packDir(t, dir)
}

func packDir(t testing.TB, dir string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.AddFS(os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// unpackLayers is the reference: it unpacks layers one after the other into a
// directory, with system calls.
func unpackLayers(t testing.TB, dir string, tars [][]byte) {
	t.Helper()
	times := make(map[string]time.Time)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	zero := time.Unix(0, 0)
	must(os.Chmod(dir, 0o755))
	times[dir] = zero
	mkdirs := func(p string) {
		var missing []string
		for ; p != dir; p = filepath.Dir(p) {
			if i, err := os.Lstat(p); err == nil && i.IsDir() {
				break
			}
			missing = append(missing, p)
		}
		for i := len(missing) - 1; i >= 0; i-- {
			_ = os.Remove(missing[i])
			must(os.Mkdir(missing[i], 0o755))
			must(os.Lchown(missing[i], 0, 0)) // a set-group-ID parent hands its own down
			must(unix.Chmod(missing[i], 0o755))
			times[missing[i]] = zero
		}
	}
	each := func(raw []byte, f func(h *tar.Header, r io.Reader, path string)) {
		r := tar.NewReader(bytes.NewReader(raw))
		for {
			h, err := r.Next()
			if errors.Is(err, io.EOF) {
				return
			}
			must(err)
			f(h, r, filepath.Join(dir, h.Name))
		}
	}
	for _, raw := range tars {
		each(raw, func(_ *tar.Header, _ io.Reader, path string) {
			base := filepath.Base(path)
			for d := filepath.Dir(path); path != dir && d != dir; d = filepath.Dir(d) {
				if i, err := os.Lstat(d); err != nil || !i.IsDir() {
					return // nothing to remove, and links are not followed
				}
			}
			if base == ".wh..wh..opq" {
				children, _ := os.ReadDir(filepath.Dir(path))
				for _, c := range children {
					must(os.RemoveAll(filepath.Join(filepath.Dir(path), c.Name())))
				}
			} else if hidden, ok := strings.CutPrefix(base, ".wh."); ok {
				must(os.RemoveAll(filepath.Join(filepath.Dir(path), hidden)))
			}
		})
		each(raw, func(h *tar.Header, r io.Reader, path string) {
			if strings.HasPrefix(filepath.Base(path), ".wh.") {
				return
			}
			if path != dir {
				mkdirs(filepath.Dir(path))
			}
			old, err := os.Lstat(path)
			self := h.Typeflag == tar.TypeLink && filepath.Join(dir, h.Linkname) == path
			if self {
				return
			}
			if err == nil && (!old.IsDir() || h.Typeflag != tar.TypeDir) {
				must(os.RemoveAll(path))
			}
			mode := uint32(h.Mode & 0o7777)
			switch h.Typeflag {
			case tar.TypeDir:
				if err := os.Mkdir(path, 0o700); !errors.Is(err, fs.ErrExist) {
					must(err)
				}
			case tar.TypeReg:
				b, err := io.ReadAll(r)
				must(err)
				must(os.WriteFile(path, b, 0o600))
			case tar.TypeSymlink:
				must(os.Symlink(h.Linkname, path))
			case tar.TypeLink:
				must(os.Link(filepath.Join(dir, h.Linkname), path))
				return
			case tar.TypeFifo:
				must(unix.Mkfifo(path, 0o600))
			case tar.TypeChar:
				must(unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor)))))
			default:
				t.Fatalf("type %c", h.Typeflag)
			}
			must(os.Lchown(path, h.Uid, h.Gid))
			for k, v := range h.PAXRecords {
				if x, ok := strings.CutPrefix(k, "SCHILY.xattr."); ok && !strings.HasPrefix(x, "trusted.") {
					must(unix.Lsetxattr(path, x, []byte(v), 0))
				}
			}
			if h.Typeflag != tar.TypeSymlink {
				must(unix.Chmod(path, mode))
			}
			if h.Typeflag == tar.TypeDir {
				times[path] = h.ModTime
				return
			}
			ts := unix.NsecToTimespec(h.ModTime.UnixNano())
			must(unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW))
		})
	}
	for path, at := range times {
		if i, err := os.Lstat(path); err != nil || !i.IsDir() {
			continue
		}
		must(os.Chtimes(path, at, at))
	}
}

// randomLayers makes layers that add, replace and remove in all ways.
func randomLayers(t testing.TB, rnd *rand.Rand, layers int) [][]byte {
	t.Helper()
	var tars [][]byte
	linkable := []string{} // plain files of the layers below
	for range layers {
		var entries []tarEntry
		kind := map[string]byte{} // of this layer
		add := func(h tar.Header, content string) {
			h.ModTime = time.Unix(rnd.Int63n(2e9), rnd.Int63n(1e9))
			entries = append(entries, tarEntry{h, content})
		}
		pick := func(depth int) string {
			parts := make([]string, 0, depth)
			for range depth {
				parts = append(parts, string(rune('a'+rnd.Intn(4))))
			}
			return strings.Join(parts, "/")
		}
		// Nothing may lie below what is no directory in the same layer.
		free := func(p string) bool {
			if kind[p] != 0 {
				return false
			}
			for d := filepath.Dir(p); d != "."; d = filepath.Dir(d) {
				if k := kind[d]; k != 0 && k != 'd' {
					return false
				}
			}
			for other := range kind {
				if strings.HasPrefix(other, p+"/") {
					return false
				}
			}
			return true
		}
		var mine []string
		for range 14 {
			p := pick(1 + rnd.Intn(4))
			h := tar.Header{Name: p, Mode: int64(rnd.Intn(0o10000)), Uid: rnd.Intn(70000), Gid: rnd.Intn(10)}
			switch k := rnd.Intn(12); {
			case k < 3: // below what this layer does not say itself
				if kind[p] == 0 {
					h = tar.Header{Name: filepath.Dir(p) + "/.wh." + filepath.Base(p), Typeflag: tar.TypeReg}
					add(h, "")
				}
			case k == 3:
				add(tar.Header{Name: p + "/.wh..wh..opq", Typeflag: tar.TypeReg}, "")
			case !free(p):
			case k < 6:
				h.Typeflag = tar.TypeDir
				h.Name += "/"
				if rnd.Intn(3) == 0 {
					h.PAXRecords = map[string]string{"SCHILY.xattr.user.d": "dir", "SCHILY.xattr.trusted.overlay.opaque": "y"}
				}
				kind[p] = 'd'
				add(h, "")
			case k < 9:
				h.Typeflag = tar.TypeReg
				if rnd.Intn(3) == 0 {
					h.PAXRecords = map[string]string{"SCHILY.xattr.user.x": string([]byte{0, 1, byte(rnd.Intn(256))}), "SCHILY.xattr.trusted.t": "1"}
				}
				kind[p] = 'f'
				mine = append(mine, p)
				add(h, strings.Repeat(fmt.Sprint(rnd.Int63()), rnd.Intn(1000)))
			case k == 9:
				h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, "../"+pick(2), 0o777
				kind[p] = 'l'
				add(h, "")
			case k == 10:
				kind[p] = 'n'
				h.Typeflag = []byte{tar.TypeFifo, tar.TypeChar}[rnd.Intn(2)]
				if h.Typeflag == tar.TypeChar {
					h.Devmajor, h.Devminor = 1, int64(3+rnd.Intn(5))
				}
				add(h, "")
			case len(mine) > 0:
				h.Typeflag, h.Linkname = tar.TypeLink, mine[rnd.Intn(len(mine))]
				kind[p] = 'f'
				add(h, "")
			}
		}
		tars = append(tars, tarLayer(t, entries))
		linkable = append(linkable, mine...)
		// A link to a file of a layer below, if it is still there.
		probe := t.TempDir()
		unpackLayers(t, probe, tars)
		for _, f := range linkable {
			if i, err := os.Lstat(filepath.Join(probe, f)); err == nil && i.Mode().IsRegular() && rnd.Intn(3) == 0 {
				tars = append(tars, tarLayer(t, []tarEntry{{tar.Header{Name: "x/" + fmt.Sprint(len(tars)), Typeflag: tar.TypeLink, Linkname: f}, ""}}))
				break
			}
		}
	}
	return tars
}

// mountLayers shows what a sandbox of the layers would see.
func mountLayers(t testing.TB, m *Mounts, ds []Digest, owner string) string {
	t.Helper()
	var dirs []string
	for _, d := range ds {
		dir, err := m.Acquire(context.Background(), d, owner)
		if err != nil {
			t.Fatal(err)
		}
		dirs = append(dirs, dir)
	}
	if len(dirs) == 1 {
		return dirs[0]
	}
	fd, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for i := len(dirs) - 1; i >= 0; i-- {
		if err := unix.FsconfigSetString(fd, "lowerdir+", dirs[i]); err != nil {
			t.Skipf("overlay without lowerdir+: %v", err)
		}
	}
	if err := unix.FsconfigCreate(fd); err != nil {
		t.Fatal(err)
	}
	mfd, err := unix.Fsmount(fd, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(mfd) })
	return fmt.Sprintf("/proc/self/fd/%d", mfd)
}

// Whatever the layers do to each other, the imported image equals what unpacking them one by one gives.
func TestImportedImageEqualsUnpacked(t *testing.T) {
	needRoot(t)
	s := openStore(t, t.TempDir())
	m := openMounts(t, s, 0)
	rounds := 15
	if testing.Short() {
		rounds = 5
	}
	split := 0
	for seed := range rounds {
		rnd := rand.New(rand.NewSource(int64(seed)))
		tars := randomLayers(t, rnd, 1+rnd.Intn(6))
		ref := t.TempDir()
		unpackLayers(t, ref, tars)
		img := imageOf(t, tars, v1.Config{})
		raw := layoutTar(t, img)
		for _, collapse := range []int64{0, 1, 4000} {
			im, err := s.ImportArchive(context.Background(), bytes.NewReader(raw), oci.Layout, "", ImportOptions{
				Name: fmt.Sprintf("i%d-%d", seed, collapse), Kind: Base, Collapse: collapse,
			})
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			c, err := s.Compose(context.Background(), "", string(im.Layer.Digest), "", nil)
			if err != nil {
				t.Fatal(err)
			}
			if len(c.Digests) > 1 {
				split++
			}
			got, want := erofstest.ReadTree(t, mountLayers(t, m, c.Digests, fmt.Sprint(seed))), erofstest.ReadTree(t, ref)
			if len(c.Digests) > 1 {
				// As with any stack of overlayfs, links that reach into another piece are copies.
				got, want = withoutLinks(got), withoutLinks(want)
			}
			if diffs := erofstest.Diff(want, got); len(diffs) > 0 {
				t.Fatalf("seed %d, collapse %d, %d pieces: %s", seed, collapse, len(c.Digests), strings.Join(diffs[:min(len(diffs), 5)], "\n"))
			}
			if p, err := s.Verify(context.Background(), im.Layer.Digest, nil); err != nil || len(p) > 0 {
				t.Fatal(p, err)
			}
		}
		if err := m.Release(fmt.Sprint(seed)); err != nil {
			t.Fatal(err)
		}
	}
	if split < rounds/2 {
		t.Errorf("only %d imports were in pieces", split)
	}
}

func withoutLinks(t erofstest.Tree) erofstest.Tree {
	for p, n := range t {
		n.Nlink, n.Same = 0, ""
		t[p] = n
	}
	return t
}

// Cases that random layers rarely hit, each against the reference.
func TestImportedCases(t *testing.T) {
	needRoot(t)
	s := openStore(t, t.TempDir())
	m := openMounts(t, s, 0)
	reg := func(n, content string) tarEntry {
		return tarEntry{tar.Header{Name: n, Typeflag: tar.TypeReg, Mode: 0o4755}, content}
	}
	dir := func(n string) tarEntry {
		return tarEntry{tar.Header{Name: n + "/", Typeflag: tar.TypeDir, Mode: 0o2770, Uid: 5, Gid: 6, ModTime: time.Unix(77, 5)}, ""}
	}
	link := func(n, to string) tarEntry {
		return tarEntry{tar.Header{Name: n, Typeflag: tar.TypeLink, Linkname: to}, ""}
	}
	sym := func(n, to string) tarEntry {
		return tarEntry{tar.Header{Name: n, Typeflag: tar.TypeSymlink, Linkname: to}, ""}
	}
	with := func(e tarEntry) tarEntry {
		e.h.PAXRecords = map[string]string{"SCHILY.xattr.security.harena": "a\x00b"}
		if e.h.Typeflag == tar.TypeReg {
			e.h.PAXRecords["SCHILY.xattr.user.long"] = strings.Repeat("v", 3000)
		}
		return e
	}
	node := func(n string, kind byte) tarEntry {
		return tarEntry{tar.Header{Name: n, Typeflag: kind, Devmajor: 1, Devminor: 3, Mode: 0o600}, ""}
	}
	owned := func(n string, sec, nsec int64) tarEntry {
		return tarEntry{tar.Header{Name: n, Typeflag: tar.TypeReg, Uid: 4_000_000_000, Gid: 70_000, ModTime: time.Unix(sec, nsec), Format: tar.FormatPAX}, ""}
	}
	for name, layers := range map[string][][]tarEntry{
		"dir, file, dir":           {{dir("a"), reg("a/x", "1")}, {reg("a", "2")}, {dir("a"), reg("a/y", "3")}},
		"dir, file, dir, implied":  {{dir("a"), reg("a/x", "1")}, {reg("a", "2")}, {reg("a/y", "3")}},
		"removed, made again":      {{dir("a"), reg("a/x", "1")}, {reg(".wh.a", "")}, {dir("a"), reg("a/y", "3")}},
		"removed and made at once": {{dir("a"), reg("a/x", "1")}, {dir("a"), reg("a/y", "2"), reg(".wh.a", "")}},
		"opaque, then merged":      {{dir("a"), reg("a/x", "1")}, {reg("a/y", "2"), reg("a/.wh..wh..opq", "")}, {reg("a/z", "3")}},
		"opaque root":              {{reg("x", "1")}, {reg(".wh..wh..opq", ""), reg("y", "2")}},
		"attributes kept":          {{dir("a"), dir("a/b"), dir(".")}, {reg("a/b/c", "2")}},
		"link target replaced":     {{reg("a", "old"), link("b", "a")}, {reg("a", "new")}},
		"link target removed":      {{reg("a", "old"), link("b", "a"), link("c", "b")}, {reg(".wh.a", "")}},
		"link across":              {{reg("a", "old")}, {link("b", "a")}, {link("c", "b"), reg(".wh.a", "")}},
		"link to itself":           {{reg("a", "x"), link("a", "./a")}},
		"symlink replaced by dir":  {{sym("lib", "usr/lib"), reg("usr/lib/x", "1")}, {reg("lib/y", "2")}},
		"symlink linked":           {{sym("s", "nowhere"), link("t", "s")}},
		"empty layers":             {{}, {reg("f", "1")}, {}},
		"nothing":                  {},
		"whiteout of nothing":      {{reg(".wh.a", ""), reg("b/.wh.c", ""), reg("f", "1")}, {reg("f/.wh.x", "")}},
		"attributes of all kinds":  {{with(sym("l", "x")), with(dir("d")), with(reg("f", "1")), with(node("p", tar.TypeFifo)), with(node("c", tar.TypeChar))}, {link("m", "l"), link("q", "c")}},
		"owners and times":         {{owned("a", -1, 999_999_999), owned("b", -2_000_000_000, 1), owned("c", 7_000_000_000, 5)}},
		"long and odd names":       {{reg(strings.Repeat("n", 255), "1"), reg("new\nline", "2"), reg(strings.Repeat("deep/", 700)+"f", "3"), dir("empty")}},
		"whiteout of the whiteout": {{dir("a"), reg("a/x", "1")}, {reg("a/.wh.x", "")}, {reg("a/x", "3")}, {reg("a/.wh.x", "")}},
	} {
		var tars [][]byte
		for _, l := range layers {
			tars = append(tars, tarLayer(t, l))
		}
		ref := t.TempDir()
		unpackLayers(t, ref, tars)
		raw := layoutTar(t, imageOf(t, tars, v1.Config{}))
		for _, collapse := range []int64{0, 1} {
			im, err := s.ImportArchive(context.Background(), bytes.NewReader(raw), oci.Layout, "", ImportOptions{Name: "x", Kind: Base, Collapse: collapse})
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			ds := append(slices.Clone(im.Layer.Parents), im.Layer.Digest)
			got, want := erofstest.ReadTree(t, mountLayers(t, m, ds, name)), erofstest.ReadTree(t, ref)
			if len(ds) > 1 {
				got, want = withoutLinks(got), withoutLinks(want)
			}
			if diffs := erofstest.Diff(want, got); len(diffs) > 0 {
				t.Errorf("%s, %d pieces: %s", name, len(ds), strings.Join(diffs, "\n"))
			}
		}
		if err := m.Release(name); err != nil {
			t.Error(err)
		}
	}
}

// What docker save writes imports by its tag, and the config is kept.
func TestImportDockerArchive(t *testing.T) {
	s := openStore(t, t.TempDir())
	config := v1.Config{
		Env: []string{"PATH=/bin", "A=b=c", "=bad"}, WorkingDir: "/srv", User: "7:8", Entrypoint: []string{"/bin/e"}, Cmd: []string{"c", ""},
		Labels: map[string]string{"k": "v"},
	}
	content := tarLayer(t, []tarEntry{{tar.Header{Name: "f", Typeflag: tar.TypeReg, Mode: 0o644}, "one"}})
	one := imageOf(t, [][]byte{content}, config)
	two := imageOf(t, [][]byte{content, content}, v1.Config{})
	tags := map[name.Tag]v1.Image{}
	for n, img := range map[string]v1.Image{"one:1": one, "two:2": two} {
		tag, err := name.NewTag(n)
		if err != nil {
			t.Fatal(err)
		}
		tags[tag] = img
	}
	var b bytes.Buffer
	if err := gtar.MultiWrite(tags, &b); err != nil {
		t.Fatal(err)
	}
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	_, _ = w.Write(b.Bytes())
	_ = w.Close()
	for _, raw := range [][]byte{b.Bytes(), z.Bytes()} {
		im, err := s.ImportArchive(context.Background(), bytes.NewReader(raw), oci.DockerArchive, "one:1", ImportOptions{Name: "one", Kind: Base})
		if err != nil {
			t.Fatal(err)
		}
		got := fmt.Sprintf("%q", im.Layer.Config)
		want := fmt.Sprintf("%q", ImageConfig{Env: config.Env[:2], WorkingDir: "/srv", User: "7:8", Entrypoint: config.Entrypoint, Cmd: config.Cmd, Labels: config.Labels})
		if got != want {
			t.Errorf("config %s, want %s", got, want)
		}
		if !strings.HasPrefix(im.Layer.Source, "docker-archive:sha256:") {
			t.Errorf("source %q", im.Layer.Source)
		}
	}
	for ref, kind := range map[string]errs.Kind{"": errs.Invalid, "three:1": errs.NotFound} {
		_, err := s.ImportArchive(context.Background(), bytes.NewReader(b.Bytes()), oci.DockerArchive, ref, ImportOptions{Name: "x", Kind: Base})
		if !errs.Is(err, kind) {
			t.Errorf("ref %q: %v", ref, err)
		}
	}
	// The content of a layer is not what its config says.
	broken := bytes.ReplaceAll(b.Bytes(), []byte("one"), []byte("two"))
	_, err := s.ImportArchive(context.Background(), bytes.NewReader(broken), oci.DockerArchive, "two:1", ImportOptions{Name: "x", Kind: Base})
	if !errs.Is(err, errs.Invalid) || !strings.Contains(fmt.Sprint(err), "digest") {
		t.Errorf("changed content: %v", err)
	}
	if tmp, _ := os.ReadDir(s.tmp()); len(tmp) != 0 {
		t.Errorf("left in tmp: %v", tmp)
	}
}

// Pieces that have content in common are the same layers when nothing changed.
func TestPiecesImportedAgain(t *testing.T) {
	s := openStore(t, t.TempDir())
	rnd := rand.New(rand.NewSource(1))
	random := func(n int) string {
		b := make([]byte, n)
		rnd.Read(b)
		return string(b)
	}
	reg := func(n, content string) tarEntry {
		return tarEntry{tar.Header{Name: n, Typeflag: tar.TypeReg, Mode: 0o644}, content}
	}
	both := random(8192)
	img := imageOf(t, [][]byte{
		tarLayer(t, []tarEntry{reg("a", random(40960)), reg("both", both)}),
		tarLayer(t, []tarEntry{reg("b", random(409600)), reg("again", both)}),
	}, v1.Config{})
	raw := layoutTar(t, img)
	var digests []Digest
	for range 2 {
		im, err := s.ImportArchive(context.Background(), bytes.NewReader(raw), oci.Layout, "", ImportOptions{Name: "x", Kind: Base, Collapse: 1})
		if err != nil {
			t.Fatal(err)
		}
		if len(im.Layer.Parents) != 1 {
			t.Fatalf("%d layers below", len(im.Layer.Parents))
		}
		digests = append(digests, im.Layer.Digest)
	}
	if digests[0] != digests[1] {
		t.Error("an image that did not change is another layer")
	}
}
