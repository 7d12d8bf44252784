// Package tokens keeps the bearer tokens that an apiserver accepts. Only their
// hashes are stored; a token itself is shown once, when it is made.
//
// A token is one of two forms: "hrn_" and 43 characters of base64url (256 random
// bits), or "e2b_" and 40 hexadecimal digits (160 bits), which older E2B clients insist on.
package tokens

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"github.com/harena-dev/harena/internal/errs"
)

// Form is the spelling of a token.
type Form string

// The forms.
const (
	FormHarena Form = "hrn"
	FormE2B    Form = "e2b"
)

// DefaultProject owns everything until projects are told apart.
const DefaultProject = "default"

// Principal is who a token stands for.
type Principal struct {
	TokenID string
	Role    string
	Project string
}

// RoleAdmin may do everything.
const RoleAdmin = "admin"

var tokenPattern = regexp.MustCompile(`^(hrn_[A-Za-z0-9_-]{43}|e2b_[0-9a-f]{40})$`)

// fileFormat is the version of tokens.json.
const fileFormat = 1

type file struct {
	Format int     `json:"format"`
	Tokens []entry `json:"tokens"`
}

type entry struct {
	ID      string    `json:"id"`
	SHA256  string    `json:"sha256"`
	Role    string    `json:"role"`
	Project string    `json:"project"`
	Created time.Time `json:"created"`
}

// Store is the set of tokens of one apiserver, kept in one file. It is safe for
// concurrent use; one process owns the file.
type Store struct {
	path   string
	random io.Reader
	now    func() time.Time

	mu      sync.RWMutex
	entries []entry
}

// Open reads the file at path; a missing file is an empty store.
func Open(path string, random io.Reader, now func() time.Time) (*Store, error) {
	s := &Store{path: path, random: random, now: now}
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read tokens: %w", err)
	}
	var f file
	if err := json.Unmarshal(b, &f); err != nil {
		return nil, errs.E(errs.Precondition, "%s is damaged: %w", path, err).WithHint("restore it, or remove it: the next start makes a new token")
	}
	if f.Format != fileFormat {
		return nil, errs.E(errs.Unsupported, "%s has format %d, this version reads %d", path, f.Format, fileFormat).WithHint("use the newer version of harena that wrote it")
	}
	s.entries = f.Tokens
	return s, nil
}

// Create makes a token, stores its hash and returns it.
func (s *Store) Create(form Form, role, project string) (id, token string, err error) {
	token, err = generate(s.random, form)
	if err != nil {
		return "", "", err
	}
	idBytes := make([]byte, 6)
	if _, err := io.ReadFull(s.random, idBytes); err != nil {
		return "", "", fmt.Errorf("read random bytes: %w", err)
	}
	sum := sha256.Sum256([]byte(token))
	e := entry{ID: "tk" + hex.EncodeToString(idBytes), SHA256: hex.EncodeToString(sum[:]), Role: role, Project: project, Created: s.now().UTC()}
	s.mu.Lock()
	defer s.mu.Unlock()
	entries := append(append([]entry(nil), s.entries...), e)
	if err := save(s.path, entries); err != nil {
		return "", "", err
	}
	s.entries = entries
	return e.ID, token, nil
}

func generate(random io.Reader, form Form) (string, error) {
	n := 32
	if form == FormE2B {
		n = 20
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(random, b); err != nil {
		return "", fmt.Errorf("read random bytes: %w", err)
	}
	if form == FormE2B {
		return "e2b_" + hex.EncodeToString(b), nil
	}
	return "hrn_" + base64.RawURLEncoding.EncodeToString(b), nil
}

// Verify returns the principal of a token, or an error of kind unauthenticated.
// Hashes are compared in constant time, all of them: neither how much of a
// token was right nor where it stands in the file can be timed.
func (s *Store) Verify(token string) (Principal, error) {
	if !tokenPattern.MatchString(token) {
		return Principal{}, errs.E(errs.Unauthenticated, "the token has neither the form hrn_… nor e2b_…").
			WithHint("use the token that `harena up` wrote to client.json")
	}
	sum := sha256.Sum256([]byte(token))
	want := []byte(hex.EncodeToString(sum[:]))
	s.mu.RLock()
	defer s.mu.RUnlock()
	found := -1
	for i, e := range s.entries {
		if subtle.ConstantTimeCompare(want, []byte(e.SHA256)) == 1 {
			found = i
		}
	}
	if found < 0 {
		return Principal{}, errs.E(errs.Unauthenticated, "the token is not known to this server").
			WithHint("use the token that `harena up` wrote to client.json; set it as HARENA_TOKEN or in the profile")
	}
	e := s.entries[found]
	return Principal{TokenID: e.ID, Role: e.Role, Project: e.Project}, nil
}

// save replaces the file; a reader, also after a crash, sees the old or the new one.
func save(path string, entries []entry) error {
	b, err := json.MarshalIndent(file{Format: fileFormat, Tokens: entries}, "", "  ")
	if err != nil {
		return err
	}
	return WriteFile(path, append(b, '\n'))
}

// WriteFile replaces path with content, readable by its owner only, durably.
func WriteFile(path string, content []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	return dir.Sync()
}
