package erofs_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/erofs"
	"github.com/harena-dev/harena/internal/storage/erofs/erofstest"
)

// mess changes a live tree at random; what fails (a directory that is not empty,
// a name that is gone) is left as it is.
func mess(t *testing.T, root string, r *rand.Rand, steps int) {
	t.Helper()
	pick := func() string {
		path := root
		for range 1 + r.IntN(3) {
			path += fmt.Sprintf("/%c", 'a'+r.IntN(5))
		}
		return path
	}
	for range steps {
		at, to := pick(), pick()
		switch r.IntN(12) {
		case 0, 1:
			_ = os.Mkdir(at, 0o755)
		case 2:
			_ = os.RemoveAll(at)
		case 3:
			_ = os.Remove(at)
		case 4: // a directory anew: opaque where there was one below
			if os.RemoveAll(at) == nil {
				_ = os.Mkdir(at, 0o700)
			}
		case 5:
			_ = os.Rename(at, to)
		case 6:
			_ = os.Link(at, to)
		case 7:
			_ = os.Symlink("target", at)
		case 8:
			_ = unix.Setxattr(at, "user.n", []byte{byte(r.IntN(256))}, 0)
		case 9:
			_ = os.Chmod(at, os.FileMode(0o700|r.IntN(64)))
		default:
			content := make([]byte, r.IntN(20_000))
			for i := range content {
				content[i] = byte(i / 4096 * 7) // blocks that others have too
			}
			if len(content) > 5 {
				content[len(content)/2] = byte(r.IntN(3))
			}
			_ = os.WriteFile(at, content, 0o644)
		}
	}
}

// contentOnly leaves out what overlayfs does not keep when it copies a file up:
// which names are one file.
func contentOnly(tree erofstest.Tree) erofstest.Tree {
	for path, n := range tree {
		n.Nlink, n.Same = 0, ""
		tree[path] = n
	}
	return tree
}

// TestMergeEqualsStack: whatever was done to a sandbox between its snapshots, an
// overlay of the merged image shows what one of all of them shows, on any part of
// the stack, and listing it finds nothing that is not there.
func TestMergeEqualsStack(t *testing.T) {
	for seed := range uint64(25) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { mergeOnce(t, rand.New(rand.NewPCG(seed, 5))) })
	}
}

func mergeOnce(t *testing.T, r *rand.Rand) {
	lib := make(library)
	first := t.TempDir()
	mess(t, first, r, 40)
	base := lib.fromDir(t, first, erofs.Options{})
	layers, mounts := []*written{base}, []string{base.mount(t)}
	parents := []*erofs.Blob{base.blob}
	const snapshots = 4
	var upper string
	for i := range snapshots {
		dir := t.TempDir()
		live := overlay(t, dir, mounts...)
		mess(t, live, r, 40)
		upper = filepath.Join(dir, "data")
		snap := lib.fromDir(t, upper, erofs.Options{KeepTrusted: true, Parents: parents})
		layers, mounts = append(layers, snap), append([]string{snap.mount(t)}, mounts...)
		parents = append([]*erofs.Blob{snap.blob}, parents...)
		want := contentOnly(erofstest.ReadTree(t, live))
		erofstest.CompareTrees(t, want, contentOnly(erofstest.ReadTree(t, overlay(t, "", mounts...))))
		if i == 0 {
			continue
		}
		// All snapshots so far, the last one as a directory, and as an image.
		for from := 1; from <= i; from++ {
			var below []*erofs.Image
			for _, l := range layers[:from] {
				below = append(below, l.open(t))
			}
			merge := func(stack []*written, upper *os.File) *written {
				return lib.write(t, erofs.Options{Parents: parents[1:]}, func(im images, o erofs.Options) (*erofs.Result, error) {
					var s []erofs.Stacked
					for _, l := range stack {
						s = append(s, l.stacked(t))
					}
					return erofs.Merge(context.Background(), below, s, upper, im.meta, im.blob, o)
				})
			}
			f, err := os.Open(upper)
			if err != nil {
				t.Fatal(err)
			}
			one := merge(layers[from:i+1], f)
			f.Close()
			two := merge(layers[from:], nil)
			if two.res.BlobBytes != 0 {
				t.Errorf("merging images copied %d bytes", two.res.BlobBytes)
			}
			under := slices.Clone(mounts[len(mounts)-from:])
			for _, m := range []*written{one, two} {
				m.fsck(t)
				over := overlay(t, "", append([]string{m.mount(t)}, under...)...)
				erofstest.CompareTrees(t, want, contentOnly(erofstest.ReadTree(t, over)))
			}
		}
	}
}

// TestMergeKeepsLinks: hard links within a layer stay, also of files that an
// upper layer has in part only.
func TestMergeKeepsLinks(t *testing.T) {
	lib := make(library)
	one, two := t.TempDir(), t.TempDir()
	for _, step := range []error{
		os.WriteFile(one+"/a", []byte("content"), 0o600), os.Link(one+"/a", one+"/b"), os.Link(one+"/a", one+"/c"), os.Mkdir(one+"/d", 0o755), os.WriteFile(one+"/d/f", nil, 0o600),
		os.WriteFile(two+"/b", []byte("other"), 0o600), os.Link(two+"/b", two+"/e"), unix.Mknod(two+"/d", unix.S_IFCHR, 0), unix.Mknod(two+"/none", unix.S_IFCHR, 0),
	} {
		if step != nil {
			t.Fatal(step)
		}
	}
	stack := []erofs.Stacked{lib.fromDir(t, one, erofs.Options{}).stacked(t), lib.fromDir(t, two, erofs.Options{}).stacked(t)}
	m := lib.write(t, erofs.Options{}, func(im images, o erofs.Options) (*erofs.Result, error) {
		return erofs.Merge(context.Background(), nil, stack, nil, im.meta, im.blob, o)
	})
	m.fsck(t)
	got := erofstest.ReadTree(t, m.mount(t))
	want := map[string]string{".": "", "a": "a", "b": "b", "c": "a", "e": "b"} // nothing is below: no whiteouts
	if len(got) != len(want) {
		t.Errorf("names %v", got)
	}
	for name, same := range want {
		if n := got[name]; n.Same != same || same != "" && n.Nlink != 2 {
			t.Errorf("%s: %+v", name, n)
		}
	}
	if m.res.LogicalBytes != 12 || m.res.Files != 4 {
		t.Errorf("%+v", m.res)
	}
}

// TestMergeRefuses: marks of overlayfs that have no meaning here.
func TestMergeRefuses(t *testing.T) {
	lib := make(library)
	for attr, value := range map[string]string{"whiteout": "y", "opaque": "x", "xwhiteouts": "y"} {
		dir := t.TempDir()
		if err := os.Mkdir(dir+"/d", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Setxattr(dir+"/d", "trusted.overlay."+attr, []byte(value), 0); err != nil {
			t.Skip(err)
		}
		s := lib.fromDir(t, dir, erofs.Options{KeepTrusted: true}).stacked(t)
		im := newImages(t)
		if _, err := erofs.Merge(context.Background(), nil, []erofs.Stacked{s}, nil, im.meta, im.blob, erofs.Options{}); !errs.Is(err, errs.Unsupported) {
			t.Errorf("%s=%s: %v", attr, value, err)
		}
	}
	dir := t.TempDir()
	if err := unix.Setxattr(dir, "trusted.overlay.redirect", []byte("/x"), 0); err != nil {
		t.Skip(err)
	}
	im := newImages(t)
	if _, err := erofs.FromDir(context.Background(), dir, im.meta, im.blob, erofs.Options{KeepTrusted: true}); !errs.Is(err, errs.Invalid) {
		t.Errorf("a redirect: %v", err)
	}
	if _, err := erofs.Merge(context.Background(), nil, nil, nil, im.meta, im.blob, erofs.Options{}); !errs.Is(err, errs.Invalid) {
		t.Errorf("nothing to merge: %v", err)
	}
}
