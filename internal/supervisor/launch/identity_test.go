package launch

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// What an image has of another machine's identity is made anew, once for each sandbox; what it does not have is not made, and
// links are left alone.
func TestIdentitiesAreMadeAnew(t *testing.T) {
	lower := t.TempDir()
	write := func(name, content string) {
		t.Helper()
		path := filepath.Join(lower, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("etc/machine-id", "old\n")
	write("var/lib/dbus/machine-id", "old\n")
	write("var/lib/systemd/random-seed", "old")
	if err := os.Chmod(filepath.Join(lower, "var/lib"), 0o711); err != nil {
		t.Fatal(err)
	}
	outside := filepath.Join(t.TempDir(), "outside")
	if err := os.MkdirAll(outside, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, filepath.Join(lower, "var/lib/urandom")); err != nil {
		t.Fatal(err)
	}
	var ids [][]byte
	for range 2 {
		upper := t.TempDir()
		if err := prepareUpper(upper, []string{lower}, "host"); err != nil {
			t.Fatal(err)
		}
		id, err := os.ReadFile(filepath.Join(upper, "etc/machine-id"))
		if err != nil {
			t.Fatal(err)
		}
		other, err := os.ReadFile(filepath.Join(upper, "var/lib/dbus/machine-id"))
		if err != nil || !bytes.Equal(id, other) || len(id) != 33 {
			t.Errorf("machine IDs %q and %q: %v", id, other, err)
		}
		seed, err := os.ReadFile(filepath.Join(upper, "var/lib/systemd/random-seed"))
		if err != nil || len(seed) != 512 {
			t.Errorf("seed of %d bytes: %v", len(seed), err)
		}
		if st, err := os.Stat(filepath.Join(upper, "var/lib")); err != nil || st.Mode().Perm() != 0o711 {
			t.Errorf("var/lib: %v %v", st.Mode(), err)
		}
		if entries, _ := os.ReadDir(outside); len(entries) != 0 {
			t.Error("a link was followed")
		}
		ids = append(ids, id)
	}
	if bytes.Equal(ids[0], ids[1]) {
		t.Error("two sandboxes have one machine ID")
	}
}
