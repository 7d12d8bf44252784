package launch

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// identity makes what no two machines should share: files that an image, or the snapshot of another sandbox, may have. Only
// those that are there are made anew.
type identity struct {
	path string
	mode uint32
	make func() ([]byte, error)
}

// identities lists them. Both machine IDs are one (machine-id(5)).
func identities() []identity {
	id := make([]byte, 16)
	machine := func() ([]byte, error) {
		if _, err := rand.Read(id); err != nil {
			return nil, err
		}
		// systemd makes them valid UUIDs of version 4 (sd-id128).
		id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80
		return []byte(hex.EncodeToString(id) + "\n"), nil
	}
	first, err := machine()
	fixed := func() ([]byte, error) { return first, err }
	seed := func() ([]byte, error) {
		b := make([]byte, 512)
		_, err := rand.Read(b)
		return b, err
	}
	return []identity{
		{"etc/machine-id", 0o444, fixed},
		{"var/lib/dbus/machine-id", 0o444, fixed},
		{"var/lib/systemd/random-seed", 0o600, seed},
		{"var/lib/urandom/random-seed", 0o600, seed},
	}
}

// writeIdentities replaces the identities that the layers have as regular files, in the new writable layer u. Links are not
// followed: the file that one points to is replaced by itself, if it is of these.
func writeIdentities(u *os.File, lowers []*os.File) error {
	for _, id := range identities() {
		if err := writeIdentity(u, lowers, id); err != nil {
			return fmt.Errorf("make /%s: %w", id.path, err)
		}
	}
	return nil
}

func writeIdentity(u *os.File, lowers []*os.File, id identity) error {
	stacks := [][]*os.File{lowers}
	defer func() {
		for _, s := range stacks[1:] {
			closeAll(s)
		}
	}()
	dirs := strings.Split(path.Dir(id.path), "/")
	for _, name := range dirs {
		next, err := below(stacks[len(stacks)-1], name)
		stacks = append(stacks, next)
		if err != nil || len(next) == 0 {
			return err
		}
	}
	if !hasFile(stacks[len(stacks)-1], path.Base(id.path)) {
		return nil
	}
	at := int(u.Fd())
	for i, name := range dirs {
		err := unix.Mkdirat(at, name, 0o755)
		made := err == nil
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
		d, err := openDir(at, name)
		if err != nil {
			return err
		}
		defer d.Close() //nolint:errcheck // nothing written to it
		if made {
			var st unix.Stat_t
			if err := unix.Fstat(int(stacks[i+1][0].Fd()), &st); err != nil {
				return err
			}
			if err := copyAttrs(d, &st); err != nil {
				return err
			}
		}
		at = int(d.Fd())
	}
	content, err := id.make()
	if err != nil {
		return err
	}
	fd, err := unix.Openat(at, path.Base(id.path), unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, id.mode)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), id.path)
	_, err = f.Write(content)
	return errors.Join(err, f.Chmod(os.FileMode(id.mode)), f.Close())
}

// below opens the directory that a name means in a stack of layers, as overlayfs would: uppermost first, down to what hides the rest.
func below(stack []*os.File, name string) ([]*os.File, error) {
	var out []*os.File
	for _, d := range stack {
		f, err := openDir(int(d.Fd()), name)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
			break // a file, a link or a whiteout
		}
		if err != nil {
			return out, err
		}
		out = append(out, f)
		var value [2]byte
		if n, err := unix.Fgetxattr(int(f.Fd()), "trusted.overlay.opaque", value[:]); err == nil && n == 1 && value[0] == 'y' {
			break
		}
	}
	return out, nil
}

// hasFile tells whether a name means a regular file in a stack of layers.
func hasFile(stack []*os.File, name string) bool {
	for _, d := range stack {
		var st unix.Stat_t
		if err := unix.Fstatat(int(d.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err == nil {
			return st.Mode&unix.S_IFMT == unix.S_IFREG
		}
	}
	return false
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close() //nolint:errcheck // read only
	}
}
