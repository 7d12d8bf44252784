package bench

import (
	"archive/tar"

	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"unsafe"

	"github.com/klauspost/compress/gzip"
	"golang.org/x/sys/unix"
)

// treeRoots are what it is made of, most useful first; firmware, kernels and debug symbols are of no use in a container.
func treeRoots() []string {
	roots := []string{"bin", "sbin", "lib", "lib64", "etc/passwd", "etc/group", "etc/ld.so.cache", "etc/ld.so.conf", "etc/alternatives", "usr/lib64"}
	// What the jobs of small trees need.
	for _, name := range []string{"sh", "dash", "bash", "ls", "tar", "gzip", "wc", "cat", "echo"} {
		roots = append(roots, "usr/bin/"+name)
	}
	for _, name := range []string{"ld-linux*", "libc.so*", "libm.so*", "libselinux*", "libacl*", "libpcre2-8*", "libtinfo*"} {
		roots = append(roots, matches("/usr/lib/*-linux-gnu/"+name)...)
	}
	// What those of larger ones need: an interpreter and a compiler.
	for _, name := range []string{
		"bin/python3*", "lib/python3.*", "bin/gcc*", "bin/as", "bin/ld", "bin/ld.bfd", "bin/*-linux-gnu-gcc*", "bin/*-linux-gnu-as", "bin/*-linux-gnu-ld*",
		"lib/*-linux-gnu/*crt?.o", "lib/*-linux-gnu/libc_nonshared.a", "include/stdc-predef.h",
		"lib/gcc/*/*/cc1", "lib/gcc/*/*/collect2", "lib/gcc/*/*/lto-wrapper", "lib/gcc/*/*/liblto_plugin.so", "lib/gcc/*/*/crt*.o", "lib/gcc/*/*/libgcc*",
	} {
		roots = append(roots, matches("/usr/"+name)...)
	}
	for _, name := range []string{
		"bfd", "bz2", "crypto", "ctf", "expat", "ffi", "gcc_s", "gmp", "isl", "jansson", "lzma", "mpc", "mpfr", "opcodes", "python3", "sframe", "ssl", "uuid", "z", "zstd",
	} {
		roots = append(roots, matches("/usr/lib/*-linux-gnu/lib"+name+"[.0-9\\-]*so*")...)
	}
	roots = append(roots, "usr/bin")
	libs, _ := filepath.Glob("/usr/lib/*")
	sort.Slice(libs, func(i, j int) bool { return treeRank(libs[i]) < treeRank(libs[j]) })
	for _, lib := range libs {
		switch filepath.Base(lib) {
		case "firmware", "modules", "debug", "linux-kbuild-6.1":
		default:
			roots = append(roots, lib[1:])
		}
	}
	return append(roots, "usr/include", "usr/share/perl", "usr/share/zoneinfo")
}

func matches(pattern string) []string {
	found, _ := filepath.Glob(pattern)
	for i := range found {
		found[i] = strings.TrimPrefix(found[i], "/")
	}
	return found
}

func treeRank(lib string) string {
	switch base := filepath.Base(lib); {
	case strings.HasSuffix(base, "-linux-gnu"):
		return "0" + base
	case strings.HasPrefix(base, "python"):
		return "1" + base
	default:
		return "2" + base
	}
}

// writeTree writes a tar of this machine's programs, up to a limit of content.
func writeTree(ctx context.Context, file string, limit int64) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	w := tar.NewWriter(f)
	for _, dir := range []string{"dev", "proc", "sys", "tmp", "run", "root", "etc", "usr", "usr/lib", "usr/share"} {
		if err := w.WriteHeader(&tar.Header{Name: dir + "/", Typeflag: tar.TypeDir, Mode: 0o755}); err != nil {
			return err
		}
	}
	seen := map[string]bool{}
	for _, root := range treeRoots() {
		err := filepath.WalkDir("/"+root, func(path string, e fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
				return nil
			}
			if err := errors.Join(err, ctx.Err()); err != nil {
				return err
			}
			if seen[path] {
				return nil
			}
			seen[path] = true
			return addToTree(w, path, e, &limit)
		})
		if err != nil {
			return err
		}
	}
	return errors.Join(w.Close(), f.Close())
}

func addToTree(w *tar.Writer, path string, e fs.DirEntry, limit *int64) error {
	info, err := e.Info()
	if err != nil {
		return nil // removed meanwhile
	}
	target := ""
	switch {
	case info.Mode().IsRegular() && info.Size() > *limit:
		return nil
	case info.Mode()&fs.ModeSymlink != 0:
		if target, err = os.Readlink(path); err != nil {
			return nil
		}
	case !info.Mode().IsRegular() && !info.IsDir():
		return nil
	}
	h, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return err
	}
	if h.Name = path[1:]; info.IsDir() {
		h.Name += "/"
	}
	if !info.Mode().IsRegular() {
		return w.WriteHeader(h)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	*limit -= info.Size()
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	_, err = io.CopyN(w, f, h.Size)
	return err
}

// gzipFile writes a compressed copy of a file, as registries keep layers.
func gzipFile(ctx context.Context, from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	defer context.AfterFunc(ctx, func() { in.Close() })() // it takes a minute of a large one
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	defer out.Close()
	z := gzip.NewWriter(out)
	_, err = io.Copy(z, in)
	return errors.Join(err, z.Close(), out.Close(), ctx.Err())
}

// randomTar writes a tar with one file of random bytes.
func randomTar(file, name string, size int64) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	w := tar.NewWriter(f)
	if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: size}); err != nil {
		return err
	}
	_, err = io.CopyN(w, rand.Reader, size)
	return errors.Join(err, w.Close(), f.Close())
}

// pages looks at the page cache of all regular files below a directory, or of one file.
type pages struct{ path string }

// erofsDevices are the read-ahead settings of all EROFS file systems. They are numbered in the order of mounts, so that which is whose
// is told only by what was there before.
func erofsDevices() (map[string]bool, error) {
	found, err := filepath.Glob("/sys/class/bdi/erofs-*/read_ahead_kb")
	all := map[string]bool{}
	for _, file := range found {
		all[file] = true
	}
	return all, err
}

// stopReadAhead has the kernel read no more of the EROFS file system that was mounted since before than it is asked for. ok is false
// when others were mounted meanwhile.
func stopReadAhead(before map[string]bool) (ok bool, err error) {
	now, err := erofsDevices()
	if err != nil {
		return false, err
	}
	maps.DeleteFunc(now, func(file string, _ bool) bool { return before[file] })
	if len(now) == 0 {
		return false, errors.New("this kernel has no read-ahead of EROFS to switch off")
	}
	for file := range now {
		if len(now) == 1 {
			return true, os.WriteFile(file, []byte("0"), 0)
		}
	}
	return false, nil
}

// drop forgets what is cached.
func (p pages) drop() error {
	return p.each(func(f *os.File, _ int64) error {
		return unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	})
}

// touched is the number of bytes of pages that are cached.
func (p pages) touched() (bytes int64, err error) {
	err = p.each(func(f *os.File, size int64) error {
		if size == 0 {
			return nil
		}
		m, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			return fmt.Errorf("mmap %s: %w", f.Name(), err)
		}
		defer func() { _ = unix.Munmap(m) }()
		v := make([]byte, (size+4095)/4096)
		if _, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m[0])), uintptr(size), uintptr(unsafe.Pointer(&v[0]))); e != 0 {
			return fmt.Errorf("mincore %s: %w", f.Name(), e)
		}
		for _, b := range v {
			bytes += int64(b&1) * 4096
		}
		return nil
	})
	return bytes, err
}

func (p pages) each(f func(*os.File, int64) error) error {
	return filepath.WalkDir(p.path, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
		if err != nil {
			return err
		}
		defer file.Close()
		info, err := file.Stat()
		if err != nil {
			return err
		}
		return f(file, info.Size())
	})
}
