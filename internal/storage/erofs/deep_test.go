package erofs_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/erofs"
)

// TestDeepDirectories: a hostile tree can not use up the server's descriptors; what is too deep or too long is told.
func TestDeepDirectories(t *testing.T) {
	for _, c := range []struct {
		depth int
		name  string
		limit string
	}{
		{1000, "d", ""},
		{1001, "d", "depth of directories"},
		{300, strings.Repeat("n", 100), "length of a path"},
	} {
		root := t.TempDir()
		at, err := os.OpenRoot(root)
		if err != nil {
			t.Fatal(err)
		}
		for range c.depth {
			if err := at.Mkdir(c.name, 0o755); err != nil {
				t.Fatal(err)
			}
			next, err := at.OpenRoot(c.name)
			if err != nil {
				t.Fatal(err)
			}
			_ = at.Close()
			at = next
		}
		_ = at.Close()
		meta, blob := temp(t), temp(t)
		_, err = erofs.FromDir(context.Background(), root, meta, blob, erofs.Options{KeepTrusted: true})
		switch {
		case c.limit == "" && err != nil:
			t.Errorf("%d levels: %v", c.depth, err)
		case c.limit != "" && (!errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), c.limit) || !strings.Contains(err.Error(), c.name+"/"+c.name)):
			t.Errorf("%d levels: %.400v", c.depth, err)
		}
	}
}

func temp(t *testing.T) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}
