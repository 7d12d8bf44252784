package erofstest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Torture fills dir, which exists, with about 3,000 names (80 MB, sparse files
// not counted). It needs root. What is in it is always the same, times of
// directories included.
func Torture(t testing.TB, dir string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a tree with devices and foreign owners needs root")
	}
	b := &maker{t: t, dir: dir, rand: rand.NewChaCha8([32]byte{'h', 'a', 'r', 'e', 'n', 'a'})}
	b.sizes()
	b.sparse()
	b.kinds()
	b.links()
	b.attributes()
	b.names()
	b.owners()
	b.times()
}

// maker makes files below dir and fails the test where it cannot.
type maker struct {
	t    testing.TB
	dir  string
	rand *rand.ChaCha8
}

func (b *maker) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *maker) path(name string) string { return b.dir + "/" + name }

func (b *maker) mkdir(name string) { b.must(os.MkdirAll(b.path(name), 0o755)) }

func (b *maker) random(n int) []byte {
	p := make([]byte, n)
	_, err := b.rand.Read(p)
	b.must(err)
	return p
}

func (b *maker) file(name string, content []byte) {
	b.must(os.MkdirAll(filepath.Dir(b.path(name)), 0o755))
	b.must(os.WriteFile(b.path(name), content, 0o644))
}

func (b *maker) mode(name string, mode uint32) { b.must(unix.Chmod(b.path(name), mode)) }

func (b *maker) sizes() {
	for _, n := range []int{0, 1, 4031, 4032, 4095, 4096, 4097, 8191, 8192, 8193, 3*4096 + 123, 1<<18 - 1, 1 << 18, 1<<18 + 1} {
		b.file(fmt.Sprintf("size/%d", n), b.random(n))
	}
	for i := range 1000 {
		b.file(fmt.Sprintf("many/file-%05d", i), []byte(strings.Repeat(fmt.Sprint(i), i%50)))
	}
	big := b.random(24<<20 + 77)
	b.file("big", big)
	b.file("same-as-big", big)
	b.file("shifted", big[4096:]) // all its chunks are in big
	mixed := bytes.Clone(big[:4<<20])
	copy(mixed[1<<20:], b.random(4096)) // one chunk differs in the middle
	b.file("mixed", mixed)
	b.file("repeated", bytes.Repeat(big[:4096], 300))
}

func (b *maker) sparse() {
	b.mkdir("sparse")
	for name, at := range map[string][]int64{
		"all-hole":   nil,
		"end":        {10 << 20},
		"start":      {0},
		"unaligned":  {4095, 4097, 1<<20 + 1},
		"striped":    {0, 8192, 16384, 24576, 32768},
		"large-hole": {1 << 20, 1 << 26},
	} {
		f, err := os.Create(b.path("sparse/" + name))
		b.must(err)
		end := int64(1 << 16)
		for _, off := range at {
			_, err := f.WriteAt([]byte("data at "+name), off)
			b.must(err)
			end = max(end, off+(3<<20)/2)
		}
		b.must(f.Truncate(end))
		b.must(f.Close())
	}
	b.file("sparse/written-zeros", append(make([]byte, 1<<20), 1))
	b.file("sparse/only-zeros", make([]byte, 123456))
}

func (b *maker) kinds() {
	b.mkdir("kinds")
	for name, dev := range map[string]struct {
		mode         uint32
		major, minor uint32
	}{
		"null":     {unix.S_IFCHR | 0o666, 1, 3},
		"whiteout": {unix.S_IFCHR, 0, 0},
		"large":    {unix.S_IFBLK | 0o660, 259, 70000},
		"largest":  {unix.S_IFCHR | 0o600, 4095, 1048575},
		"fifo":     {unix.S_IFIFO | 0o640, 0, 0},
		"socket":   {unix.S_IFSOCK | 0o755, 0, 0},
	} {
		b.must(unix.Mknod(b.path("kinds/"+name), dev.mode, int(unix.Mkdev(dev.major, dev.minor))))
	}
	b.mkdir("kinds/empty-dir")
	b.file("modes/setuid", bytes.Repeat([]byte("x"), 5000))
	b.mode("modes/setuid", 0o4755)
	b.file("modes/setgid", nil)
	b.mode("modes/setgid", 0o2711)
	b.file("modes/none", []byte("x"))
	b.mode("modes/none", 0)
	b.mkdir("modes/sticky")
	b.mode("modes/sticky", 0o1777)
	b.mkdir("modes/setgid-dir")
	b.mode("modes/setgid-dir", 0o2770)
}

func (b *maker) links() {
	b.mkdir("links/deep/er")
	for _, l := range [][2]string{{"size/1", "links/one"}, {"size/1", "links/deep/er/two"}, {"big", "links/big"}, {"kinds/fifo", "links/fifo"}, {"size/0", "links/empty"}} {
		b.must(os.Link(b.path(l[0]), b.path(l[1])))
	}
	b.must(os.Symlink("one", b.path("links/sym")))
	b.must(unix.Linkat(unix.AT_FDCWD, b.path("links/sym"), unix.AT_FDCWD, b.path("links/sym-hard"), 0))
	b.must(os.Symlink("does/not/exist", b.path("links/dangling")))
	for _, n := range []int{59, 60, 1000, 4000, 4031, 4032, 4033, 4095} {
		b.must(os.Symlink(strings.Repeat("/abcdefg", n/8+1)[:n], b.path(fmt.Sprintf("links/long-%d", n))))
	}
}

// setxattr sets an attribute; a value that the file system of the test cannot
// hold is left out.
func (b *maker) setxattr(name, attr string, value []byte) {
	err := unix.Lsetxattr(b.path(name), attr, value, 0)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.E2BIG) || errors.Is(err, unix.EOPNOTSUPP) {
		b.t.Logf("torture tree: %s of %d bytes is left out: %v", attr, len(value), err)
		return
	}
	b.must(err)
}

func (b *maker) attributes() {
	b.file("attrs/caps", bytes.Repeat([]byte("bin"), 3000))
	b.setxattr("attrs/caps", "security.capability", append([]byte{1, 0, 0, 2, 0, 4}, make([]byte, 14)...))
	b.setxattr("attrs/caps", "user.more", bytes.Repeat([]byte("bar"), 11))
	b.file("attrs/empty-value", []byte("x"))
	b.setxattr("attrs/empty-value", "user.a", nil)
	for _, n := range []int{1500, 3000, 3900, 65535} {
		name := fmt.Sprintf("attrs/value-%d", n)
		b.file(name, b.random(9000))
		b.setxattr(name, "user.long", b.random(n))
	}
	for n := range 40 { // every alignment of the chunk index behind the attributes
		name := fmt.Sprintf("attrs/aligned-%d", n)
		b.file(name, b.random(9000))
		b.setxattr(name, "user."+strings.Repeat("n", n+1), bytes.Repeat([]byte("v"), n))
	}
	b.file("attrs/several", nil)
	for n := range 20 {
		b.setxattr("attrs/several", fmt.Sprintf("user.n%d", n), b.random(n*7))
	}
	b.mkdir("attrs/opaque")
	b.setxattr("attrs/opaque", "trusted.overlay.opaque", []byte("y"))
	b.mkdir("attrs/acl")
	b.file("attrs/acl/file", []byte("x"))
	b.setxattr("attrs/acl/file", "system.posix_acl_access", acl(6, 4, 4, 4, 0))
	b.setxattr("attrs/acl", "system.posix_acl_default", acl(7, 5, 5, 5, 1))
	b.mkdir("attrs/dir")
	b.setxattr("attrs/dir", "user.of-directory", b.random(700))
}

// acl encodes user::, user:1234:, group::, mask::, other:: as the kernel does
// (include/uapi/linux/posix_acl_xattr.h).
func acl(user, named, group, mask, other uint16) []byte {
	const anyID = 0xffffffff
	out := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range []struct {
		tag, perm uint16
		id        uint32
	}{{1, user, anyID}, {2, named, 1234}, {4, group, anyID}, {16, mask, anyID}, {32, other, anyID}} {
		out = binary.LittleEndian.AppendUint16(out, e.tag)
		out = binary.LittleEndian.AppendUint16(out, e.perm)
		out = binary.LittleEndian.AppendUint32(out, e.id)
	}
	return out
}

func (b *maker) names() {
	for _, name := range []string{
		" ", "a b", "\t", "new\nline", "'\"`$", "-n", "ünïcode", "日本語", "\xff\xfe invalid", "\x01\x7f", "!before-dot", "..three", "...",
		strings.Repeat("n", 255), strings.Repeat("日", 85),
	} {
		b.file("names/"+name, []byte(name))
	}
	for n := 1; n <= 255; n++ { // directories whose blocks fill up in every way
		b.file(fmt.Sprintf("widths/%s", strings.Repeat("w", n)), nil)
	}
	for n := range 1500 {
		b.file(fmt.Sprintf("blocks/%0*d", 1+n%200, n), nil)
	}
	b.mkdir("deep/" + strings.Repeat("d/", 200))
	b.file("deep/"+strings.Repeat("d/", 200)+"leaf", []byte("leaf"))
}

func (b *maker) owners() {
	b.file("owners/large", []byte("u"))
	b.must(os.Lchown(b.path("owners/large"), 4294967294, 4294967293))
	b.must(os.Symlink("large", b.path("owners/link")))
	b.must(os.Lchown(b.path("owners/link"), 1000, 1001))
	b.must(os.Lchown(b.path("owners"), 65536, 65537))
}

// times gives every name a time of its own, nanoseconds and years before 1970
// among them.
func (b *maker) times() {
	var n int64
	b.must(filepath.WalkDir(b.dir, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		n++
		ts := []unix.Timespec{{Sec: 1}, {Sec: 1_700_000_000 + n, Nsec: n * 1_000_001 % 1_000_000_000}}
		switch n % 500 {
		case 0:
			ts[1] = unix.Timespec{Sec: -n, Nsec: 1}
		case 1:
			ts[1] = unix.Timespec{Sec: 1<<32 + n, Nsec: 999_999_999}
		}
		return unix.UtimesNanoAt(unix.AT_FDCWD, path, ts, unix.AT_SYMLINK_NOFOLLOW)
	}))
}
