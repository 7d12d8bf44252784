package erofs_test

import (
	"testing"

	"github.com/harena-dev/harena/internal/storage/erofs"
	"github.com/harena-dev/harena/internal/storage/erofs/erofstest"
)

func TestTortureFromDir(t *testing.T) {
	dir := torture(t)
	im, res := fromDir(t, dir, erofs.Options{KeepTrusted: true})
	if len(res.Warnings) > 0 {
		t.Errorf("warnings: %q", res.Warnings)
	}
	t.Logf("%+v", *res)
	im.fsck(t)
	want := erofstest.ReadTree(t, dir)
	if got := int64(len(want) - 1); got != res.Files {
		t.Errorf("the tree has %d names, the result says %d", got, res.Files)
	}
	t.Run("kernel", func(t *testing.T) {
		erofstest.CompareTrees(t, want, erofstest.ReadTree(t, im.mount(t)))
	})
	t.Run("reader", func(t *testing.T) {
		erofstest.CompareTrees(t, want, readImage(t, im.open(t)))
	})
}
