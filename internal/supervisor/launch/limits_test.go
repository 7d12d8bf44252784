package launch

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSharedLimits(t *testing.T) {
	dir := t.TempDir()
	set := func(name, value string) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(value+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if c := sharedLimits(dir); c.GetStatus() != statusOK {
		t.Errorf("a kernel without these limits: %v", c)
	}
	set("fs/aio-max-nr", "16777216")
	set("fs/file-max", "9223372036854775807")
	set("kernel/pty/max", "4096")
	if c := sharedLimits(dir); c.GetStatus() != statusOK {
		t.Errorf("high limits: %v", c)
	}
	set("fs/aio-max-nr", "65536")
	if c := sharedLimits(dir); c.GetStatus() != statusDegraded || !strings.Contains(c.GetDetail(), "fs.aio-max-nr") || !strings.Contains(c.GetHint(), "16777216") {
		t.Errorf("the kernel's default: %v", c)
	}
	set("fs/aio-max-nr", "many")
	if c := sharedLimits(dir); c.GetStatus() != statusFailed {
		t.Errorf("not a number: %v", c)
	}
}
