package disk

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestDue(t *testing.T) {
	const gib = 1 << 30
	start := time.Now()
	newWatch := func() *Watch {
		w := NewWatch("/", nil)
		w.due(100*gib, start)
		for key, limit := range map[string]int64{"small": gib, "large": 10 * gib} {
			w.Add(Target{Key: key, Limit: limit, Pids: func() []int { return nil }, Busy: func() bool { return key == "large" }})
		}
		return w
	}
	for _, c := range []struct {
		name string
		used []int64 // of the file system, look by look
		late time.Duration
		want []string
	}{
		{"nothing was written", []int64{100 * gib}, 0, nil},
		{"less than any headroom", []int64{100*gib + gib/2}, 0, nil},
		{"as much as the headroom of one", []int64{101 * gib}, 0, []string{"small"}},
		{"in steps, with space freed in between", []int64{100*gib + gib/2, 99 * gib, 100 * gib}, 0, []string{"small"}},
		{"as much as the headroom of both, the nearest first", []int64{110 * gib}, 0, []string{"small", "large"}},
		{"after a minute, what is in use", []int64{100 * gib}, WatchAll + time.Second, []string{"large"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWatch()
			var got []*watched
			for _, used := range c.used {
				got = w.due(used, time.Now().Add(c.late))
			}
			var keys []string
			for _, g := range got {
				keys = append(keys, g.Key)
			}
			if len(keys) != len(c.want) {
				t.Fatalf("due %v, want %v", keys, c.want)
			}
			for i := range keys {
				if keys[i] != c.want[i] {
					t.Fatalf("due %v, want %v", keys, c.want)
				}
			}
		})
	}
}

// What exceeds its limit is told once; what was found after a restart is measured without anything being written.
func TestWatchTellsOnce(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	told := map[string]int64{}
	w := NewWatch(dir, func(key string, used int64) {
		if told[key] != 0 {
			t.Errorf("%s is told twice", key)
		}
		told[key] = used
	})
	none := func() []int { return nil }
	idle := func() bool { return false }
	w.Adopt(Target{Key: "over", Path: dir, Limit: 4096, Pids: none, Busy: idle})
	w.Adopt(Target{Key: "within", Path: dir, Limit: 8 << 20, Pids: none, Busy: idle})
	w.Adopt(Target{Key: "gone", Path: dir, Limit: 4096, Pids: none, Busy: idle})
	w.Remove("gone")
	for i := range 3 {
		w.round(context.Background(), time.Now().Add(time.Duration(i)*time.Hour))
	}
	if len(told) != 1 || told["over"] < 1<<20 {
		t.Errorf("told %v", told)
	}
}

// Files without content are bounded as well, and noticed without anything being written to them.
func TestEmptyFilesCount(t *testing.T) {
	dir := t.TempDir()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil || st.Files == 0 {
		t.Skipf("this file system does not count inodes: %v", err)
	}
	told := map[string]int64{}
	w := NewWatch(dir, func(key string, used int64) { told[key] = used })
	w.round(context.Background(), time.Now())
	w.Add(Target{Key: "files", Path: dir, Limit: 4 << 20, Pids: func() []int { return nil }, Busy: func() bool { return false }})
	for i := range 1200 {
		if err := os.Symlink("x", filepath.Join(dir, fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
	}
	w.round(context.Background(), time.Now())
	if told["files"] < 1200*fileCost {
		t.Errorf("told %v of 1,200 files of 4 KiB", told)
	}
}
