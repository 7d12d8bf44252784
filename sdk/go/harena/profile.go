package harena

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/harena-dev/harena/internal/errs"
)

// profile is what `harena up` writes for clients.
type profile struct {
	URL     string `json:"url"`
	Token   string `json:"token"`
	Project string `json:"project,omitempty"`
}

// DefaultProfile is the path of the profile that FromEnv reads.
func DefaultProfile() (string, error) {
	dir, err := os.UserConfigDir()
	if err != nil {
		return "", fmt.Errorf("find the profile: %w", err)
	}
	return filepath.Join(dir, "harena", "client.json"), nil
}

// readProfile reads a profile. That the default one is missing is no error.
func readProfile(path string) (profile, error) {
	asked := path != ""
	if !asked {
		var err error
		if path, err = DefaultProfile(); err != nil {
			return profile{}, nil //nolint:nilerr // no home directory, no profile
		}
	}
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) && !asked {
		return profile{}, nil
	}
	if err != nil {
		return profile{}, fromErrs(errs.E(errs.Invalid, "the profile cannot be read: %w", err).
			WithHint("name a readable file, or set HARENA_URL and HARENA_TOKEN"))
	}
	var p profile
	if err := json.Unmarshal(b, &p); err != nil {
		return profile{}, fromErrs(errs.E(errs.Invalid, "the profile %s is not valid JSON: %w", path, err).
			WithHint(`it looks like {"url": "http://127.0.0.1:7070", "token": "hrn_…"}`))
	}
	return p, nil
}
