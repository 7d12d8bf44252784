package blob_test

import (
	"testing"

	"github.com/harena-dev/harena/internal/storage/blob"
	"github.com/harena-dev/harena/internal/storage/blob/blobtest"
)

func TestMemory(t *testing.T) {
	blobtest.Run(t, blobtest.Config{New: func(*testing.T) blob.Store { return blob.NewMemory() }})
}

func TestDir(t *testing.T) {
	blobtest.Run(t, blobtest.Config{New: func(t *testing.T) blob.Store {
		s, err := blob.NewDir(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		return s
	}})
}
