package blob_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
	"github.com/harena-dev/harena/internal/storage/blob/blobtest"
)

func TestVersity(t *testing.T) { testServer(t, blobtest.Versity(t), false) }

func TestSeaweedFS(t *testing.T) {
	server, mount := blobtest.SeaweedFS(t)
	t.Run("S3", func(t *testing.T) { testServer(t, server, true) })
	t.Run("Mounted", func(t *testing.T) {
		blobtest.Run(t, blobtest.Config{Objects: 300, New: func(t *testing.T) blob.Store {
			dir := filepath.Join(mount, strings.ReplaceAll(t.Name(), "/", "-"))
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			s, err := blob.NewDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			return s
		}})
	})
}

// testServer runs the suite on a server; creates says that it makes buckets when something is put into them.
func testServer(t *testing.T, server *blobtest.Server, creates bool) {
	t.Run("Suite", func(t *testing.T) {
		blobtest.Run(t, blobtest.Config{Large: 30 << 20, New: func(t *testing.T) blob.Store {
			s, err := blob.NewS3(server.Bucket(t, "pre/fix"))
			if err != nil {
				t.Fatal(err)
			}
			return s
		}})
	})
	t.Run("Errors", func(t *testing.T) {
		ctx := context.Background()
		good := server.Bucket(t, "")
		for name, test := range map[string]struct {
			change func(*blob.S3Options)
			kind   errs.Kind
		}{
			"no such bucket": {func(o *blob.S3Options) { o.Bucket = "bucket-that-is-not" }, errs.Precondition},
			"wrong key":      {func(o *blob.S3Options) { o.Credentials.AccessKey = "stranger" }, errs.Unauthenticated},
			"wrong secret":   {func(o *blob.S3Options) { o.Credentials.SecretKey = "wrong" }, errs.Unauthenticated},
			"nobody there":   {func(o *blob.S3Options) { o.Endpoint = closedPort(t) }, errs.Internal},
		} {
			o := good
			test.change(&o)
			s, err := blob.NewS3(o)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.List(ctx, "", "", 10); !errs.Is(err, test.kind) {
				t.Errorf("%s: List: %v, want %s", name, err, test.kind)
			}
			if creates && test.kind == errs.Precondition {
				continue
			}
			if err := s.Put(ctx, "o", strings.NewReader("x")); !errs.Is(err, test.kind) {
				t.Errorf("%s: Put: %v, want %s", name, err, test.kind)
			}
			if _, err := s.Get(ctx, "o", 0, -1); !errs.Is(err, test.kind) {
				t.Errorf("%s: Get: %v, want %s", name, err, test.kind)
			}
		}
	})
}

func closedPort(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}
