package files

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/harena-dev/harena/internal/errs"
)

// deadFUSE mounts a file system whose server takes every request and answers
// none but the first, and returns how to end it. Even a killed process waits for
// such an answer: the worst that something inside can do to a worker.
func deadFUSE(t *testing.T, at string) (end func()) {
	t.Helper()
	dev, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("no FUSE: %v", err)
	}
	if err := unix.Mount("dead", at, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", dev)); err != nil {
		unix.Close(dev)
		t.Skipf("no FUSE: %v", err)
	}
	answered := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 1<<17)
		for {
			n, err := unix.Read(dev, buf)
			if err == unix.EINTR || err == unix.ENOENT {
				continue
			}
			if err != nil || n < 40 {
				return
			}
			// struct fuse_in_header of include/uapi/linux/fuse.h: len, opcode, unique.
			if opcode := binary.NativeEndian.Uint32(buf[4:]); opcode != 26 { // FUSE_INIT
				continue
			}
			var out bytes.Buffer
			binary.Write(&out, binary.NativeEndian, struct {
				Len    uint32
				Error  int32
				Unique uint64
				// struct fuse_init_out
				Major, Minor, Readahead, Flags uint32
				Background, Congestion         uint16
				MaxWrite, Granularity          uint32
				Pages, Alignment               uint16
				Rest                           [8]uint32
			}{Len: 16 + 64, Unique: binary.NativeEndian.Uint64(buf[8:]), Major: 7, Minor: 31, MaxWrite: 4096, Granularity: 1})
			unix.Write(dev, out.Bytes())
			close(answered)
		}
	}()
	<-answered
	return func() {
		// A forced unmount fails what waits.
		unix.Unmount(at, unix.MNT_FORCE)
		unix.Unmount(at, unix.MNT_DETACH)
		<-done
		unix.Close(dev)
	}
}

func TestDeadFUSECostsOneOperation(t *testing.T) {
	b := newBox(t)
	b.file("f", 0, 0o644, "f")
	b.mkdir("hang", 0, 0o755)
	end := deadFUSE(t, b.host("hang"))
	b.svc.progress = 300 * time.Millisecond
	for name, op := range map[string]func() error{
		"read": func() error { _, err := b.read("", "/hang/x"); return err },
		"stat": func() error { _, err := b.stat("", "/hang/x", false); return err },
		"list": func() error { _, err := b.list("", "/hang", 1, 0); return err },
		"move": func() error { _, err := b.move("", "/f", "/hang/f", false); return err },
	} {
		began := time.Now()
		err := op()
		if !errs.Is(err, errs.Timeout) {
			t.Errorf("%s: %v", name, err)
		}
		if took := time.Since(began); took > 20*time.Second {
			t.Errorf("%s took %v", name, took)
		}
		b.svc.progress = 20 * time.Second // the machine may be slow
		if got, err := b.read("", "/f"); err != nil || got != "f" {
			t.Errorf("after %s: %q %v", name, got, err)
		}
		b.svc.progress = 300 * time.Millisecond
	}
	b.svc.pool.mu.Lock()
	t.Logf("%d killed workers wait for the kernel", b.svc.pool.dying)
	b.svc.pool.mu.Unlock()
	end()
	b.waitGoneExcept(1)
	if _, err := os.Stat(b.host("hang")); err != nil {
		t.Error(err)
	}
}
