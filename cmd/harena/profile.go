package main

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/harena-dev/harena/internal/control/tokens"
	"github.com/harena-dev/harena/sdk/go/harena"
)

// clientProfile is what a client needs to know.
type clientProfile struct {
	URL   string `json:"url"`
	Token string `json:"token"`
}

// openTokens opens the store of tokens and makes sure that DIR/client.json has
// one that is valid, and the right URL. A new token is made when it has none.
func openTokens(dir, url string) (*tokens.Store, clientProfile, error) {
	store, err := tokens.Open(filepath.Join(dir, "tokens.json"), rand.Reader, time.Now)
	if err != nil {
		return nil, clientProfile{}, err
	}
	path := filepath.Join(dir, "client.json")
	var p clientProfile
	b, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, p, err
	}
	// A damaged file is replaced: whoever can write here may make tokens anyway.
	if err == nil && json.Unmarshal(b, &p) != nil {
		p = clientProfile{}
	}
	if _, err := store.Verify(p.Token); err == nil && p.URL == url {
		return store, p, nil
	} else if err != nil {
		if _, p.Token, err = store.Create(tokens.FormHarena, tokens.RoleAdmin, tokens.DefaultProject); err != nil {
			return nil, p, err
		}
	}
	p.URL = url
	return store, p, writeProfile(path, p)
}

func writeProfile(path string, p clientProfile) error {
	b, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return err
	}
	return tokens.WriteFile(path, append(b, '\n'))
}

// writeDefaultProfile lets clients of this user find the node without settings. It returns the path.
func writeDefaultProfile(p clientProfile) (string, error) {
	path, err := harena.DefaultProfile()
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return "", fmt.Errorf("make the directory of the profile: %w", err)
	}
	return path, writeProfile(path, p)
}
