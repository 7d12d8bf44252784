package main

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

// What the node itself makes of a store's URL is not left for who opens the store.
func TestParseStore(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct{ raw, plain, direct string }{
		{"file://" + dir, "file://" + dir, ""},
		{"file://" + dir + "?direct=1", "file://" + dir, dir},
		{"file://" + dir + "/?direct=1", "file://" + dir + "/", dir},
		{"file://" + dir + "?direct=0", "file://" + dir, ""},
	} {
		plain, direct, err := parseStore(c.raw)
		if err != nil || plain != c.plain || direct != c.direct {
			t.Errorf("%s: %q, %q, %v", c.raw, plain, direct, err)
			continue
		}
		if _, err := blob.Open(context.Background(), plain, blob.Options{}); err != nil {
			t.Errorf("%s: the store is opened as %s: %v", c.raw, plain, err)
		}
	}
	s3 := "s3://bucket/prefix?endpoint=http://127.0.0.1:9000&region=eu"
	if plain, direct, err := parseStore(s3); err != nil || plain != s3 || direct != "" {
		t.Errorf("%s: %q, %q, %v", s3, plain, direct, err)
	}
	for _, raw := range []string{"s3://bucket?direct=1", "file://" + dir + "?direct=yes", "file://%zz"} {
		if _, _, err := parseStore(raw); !errs.Is(err, errs.Invalid) {
			t.Errorf("%s: %v", raw, err)
		}
	}
	// A parameter that nobody knows is not passed over.
	plain, _, err := parseStore("file://" + dir + "?direct=1&x=y")
	if err == nil {
		_, err = blob.Open(context.Background(), plain, blob.Options{})
	}
	if !errs.Is(err, errs.Invalid) {
		t.Errorf("an unknown parameter: %v", err)
	}
}

// A node does not begin with a store that never answered it.
func TestStoreOfTheFirstStart(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	for _, c := range []struct {
		status int
		code   string
		kind   errs.Kind
	}{
		{http.StatusForbidden, "SignatureDoesNotMatch", errs.Unauthenticated},
		{http.StatusForbidden, "AccessDenied", errs.Denied},
		{http.StatusNotFound, "NoSuchBucket", errs.Precondition},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(c.status)
			fmt.Fprintf(w, "<Error><Code>%s</Code></Error>", c.code)
		}))
		if _, err := openStore(context.Background(), "s3://bucket?region=eu&endpoint="+server.URL, t.TempDir()); !errs.Is(err, c.kind) {
			t.Errorf("%s: %v", c.code, err)
		}
		server.Close()
	}
	if _, err := openStore(context.Background(), "file://"+t.TempDir(), t.TempDir()); err != nil {
		t.Errorf("an empty directory: %v", err)
	}
}
