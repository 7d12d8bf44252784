package layer

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// emptied directories keep their own entry; what is in them belongs to the
// build, to the machine, or to a running system.
var emptied = []string{
	"dev", "proc", "sys", "run", "tmp", "var/tmp", "var/cache/apt", "var/lib/apt/lists", "debootstrap",
}

// dropped files are records of the build or identities that each sandbox would share.
var dropped = []string{
	"debootstrap", "etc/passwd-", "etc/group-", "etc/shadow-", "etc/gshadow-", "etc/subuid-", "etc/subgid-", "etc/.pwd.lock",
	"var/cache/ldconfig/aux-cache", "var/cache/debconf/config.dat-old", "var/cache/debconf/templates.dat-old",
	"var/lib/dpkg/status-old", "var/lib/dpkg/available-old", "var/lib/dpkg/diversions-old", "var/lib/dpkg/statoverride-old",
	"var/lib/dbus/machine-id", "var/lib/systemd/random-seed", "var/lib/systemd/credential.secret", "root/.wget-hsts", "root/.bash_history",
	"etc/apt/sources.list.d/debian.sources",
}

// cleanRoot makes a bootstrapped root file system neutral: nothing of this
// machine, of the build or of one point in time that can be left out.
// Times after released (unless it is zero) are of the build.
func cleanRoot(dir, sourcesList string, released time.Time) error {
	// os.Root keeps symbolic links that packages made from leading out of the tree.
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	for _, d := range emptied {
		if err := emptyDir(root, d); err != nil {
			return err
		}
	}
	for _, f := range dropped {
		if err := root.RemoveAll(f); err != nil {
			return err
		}
	}
	keys, err := fs.Glob(root.FS(), "etc/ssh/ssh_host_*")
	if err != nil {
		return err
	}
	for _, k := range keys {
		if err := root.Remove(k); err != nil {
			return err
		}
	}
	if err := dropLogs(root); err != nil {
		return err
	}
	for _, f := range []struct{ name, content string }{
		{"etc/machine-id", ""}, // systemd makes one at first boot (machine-id(5))
		{"etc/resolv.conf", ""},
		{"etc/hostname", "localhost\n"},
		{"etc/hosts", "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"},
		{"etc/apt/sources.list", sourcesList},
	} {
		if err := replaceFile(root, f.name, f.content); err != nil {
			return err
		}
	}
	return clampTimes(dir, released)
}

func emptyDir(root *os.Root, dir string) error {
	entries, err := fs.ReadDir(root.FS(), dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := root.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// dropLogs removes the files below /var/log; packages expect the directories.
func dropLogs(root *os.Root) error {
	return fs.WalkDir(root.FS(), "var/log", func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || e.IsDir() {
			return err
		}
		return root.Remove(path)
	})
}

// replaceFile writes a file in place of whatever has its name.
func replaceFile(root *os.Root, name, content string) error {
	if _, err := root.Stat(filepath.Dir(name)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := root.RemoveAll(name); err != nil {
		return err
	}
	if err := root.WriteFile(name, []byte(content), 0o644); err != nil {
		return err
	}
	return root.Chmod(name, 0o644)
}

// clampTimes sets modification times that the build made to the time of the
// release, so that the same packages give the same layer on any day.
func clampTimes(dir string, limit time.Time) error {
	if limit.IsZero() {
		return nil
	}
	ts := []unix.Timespec{unix.NsecToTimespec(limit.UnixNano()), unix.NsecToTimespec(limit.UnixNano())}
	return filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		if !info.ModTime().After(limit) {
			return nil
		}
		if err := unix.UtimesNanoAt(unix.AT_FDCWD, path, ts, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fmt.Errorf("set the time of %s: %w", path, err)
		}
		return nil
	})
}
