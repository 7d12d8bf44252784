package tokens_test

import (
	"crypto/rand"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/harena-dev/harena/internal/control/tokens"
	"github.com/harena-dev/harena/internal/errs"
)

func open(t *testing.T, path string) *tokens.Store {
	t.Helper()
	s, err := tokens.Open(path, rand.Reader, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestCreateVerifyReopen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tokens.json")
	s := open(t, path)
	for _, form := range []tokens.Form{tokens.FormHarena, tokens.FormE2B} {
		id, token, err := s.Create(form, tokens.RoleAdmin, tokens.DefaultProject)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(token, string(form)+"_") {
			t.Errorf("token of form %s begins with %.4s", form, token)
		}
		for name, store := range map[string]*tokens.Store{"same": s, "reopened": open(t, path)} {
			p, err := store.Verify(token)
			if err != nil || p.TokenID != id || p.Role != tokens.RoleAdmin {
				t.Errorf("%s: Verify = %+v, %v", name, p, err)
			}
		}
		b, err := os.ReadFile(path)
		if err != nil || strings.Contains(string(b), token) {
			t.Errorf("the file holds the token itself (read error: %v)", err)
		}
		changed := token[:len(token)-1] + map[bool]string{true: "a", false: "b"}[token[len(token)-1] == 'b']
		for _, bad := range []string{"", "hrn_", token[:len(token)-1], token + "a", changed, strings.ToUpper(token), "e2b_" + strings.Repeat("0", 40)} {
			if _, err := s.Verify(bad); !errs.Is(err, errs.Unauthenticated) {
				t.Errorf("Verify(%q) = %v", bad, err)
			}
		}
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode of the file: %v, %v", fi.Mode(), err)
	}
}

func TestOpenRefuses(t *testing.T) {
	for content, kind := range map[string]errs.Kind{"{": errs.Precondition, `{"format":2}`: errs.Unsupported} {
		path := filepath.Join(t.TempDir(), "tokens.json")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := tokens.Open(path, rand.Reader, time.Now); !errs.Is(err, kind) {
			t.Errorf("Open of %s = %v, want kind %s", content, err, kind)
		}
	}
}
