package cgroup

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// filesystem is what this package does to the hierarchies. Tests put a model
// of a node's cgroupfs in its place.
type filesystem interface {
	read(name string) (string, error)
	write(name, value string) error
	mkdir(dir string) error // no error when it exists
	rmdir(dir string) error
	dirs(dir string) ([]string, error) // names of child directories
}

type osFS struct{}

func (osFS) read(name string) (string, error) {
	b, err := os.ReadFile(name)
	return string(b), err
}

// write is one write(2) without O_CREAT: cgroupfs files exist or they do not.
func (osFS) write(name, value string) error {
	var fd int
	err := uninterrupted(func() (err error) {
		fd, err = unix.Open(name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	defer unix.Close(fd)
	err = uninterrupted(func() error {
		_, err := unix.Write(fd, []byte(value))
		return err
	})
	if err != nil {
		return &os.PathError{Op: "write " + value + " to", Path: name, Err: err}
	}
	return nil
}

// uninterrupted repeats a call that a signal cut short: a v1 memory limit, for
// one, takes long enough for the Go runtime's own preemption signals.
func uninterrupted(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func (osFS) mkdir(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !os.IsExist(err) {
		return err
	}
	return nil
}

func (osFS) rmdir(dir string) error {
	if err := uninterrupted(func() error { return unix.Rmdir(dir) }); err != nil && !errors.Is(err, unix.ENOENT) {
		return &os.PathError{Op: "rmdir", Path: dir, Err: err}
	}
	return nil
}

func (osFS) dirs(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}
