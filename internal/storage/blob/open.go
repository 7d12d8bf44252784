package blob

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"regexp"
	"strings"

	"github.com/harena-dev/harena/internal/errs"
)

// Options say how a store is used.
type Options struct {
	// CredentialsFile is read when the environment has none (see LoadCredentials); empty: not.
	CredentialsFile string
	Retry           *RetryPolicy // nil means DefaultRetry
	Limits          Limits
	Metrics         *Metrics // nil: not counted
	// Known: the store was in use before. A directory that is not there, or empty, is then an outage, not a mistake.
	Known bool
}

// Open returns the store that a URL names:
//
//	file:///DIR
//	s3://BUCKET[/PREFIX][?endpoint=[http://|https://]HOST[:PORT]][&region=REGION]
//
// Without endpoint it is Amazon's. No request is made: an outage does not keep a node from starting.
func Open(_ context.Context, rawURL string, o Options) (Store, error) {
	retry := DefaultRetry()
	if o.Retry != nil {
		retry = *o.Retry
	}
	s, err := open(rawURL, retry, o)
	if err != nil {
		return nil, err
	}
	// Innermost first: each attempt is counted and limited.
	if o.Metrics != nil {
		s = WithMetrics(s, o.Metrics)
	}
	s = WithLimit(s, o.Limits)
	return WithRetry(s, retry), nil
}

func open(rawURL string, retry RetryPolicy, o Options) (Store, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, badURL("store URL %q cannot be read", rawURL)
	}
	if u.User != nil {
		return nil, badURL("a store's URL has no user and password").
			WithHint("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the credentials file")
	}
	switch u.Scheme {
	case "file":
		switch {
		case u.Host != "":
			return nil, badURL("store URL %s names the host %q; a file URL has three slashes", rawURL, u.Host)
		case u.RawQuery != "" || u.Fragment != "":
			return nil, badURL("store URL %s has parameters, which file URLs do not", rawURL)
		}
		if o.Known {
			return KnownDir(u.Path)
		}
		return NewDir(u.Path)
	case "s3":
		so, err := parseS3(u)
		if err != nil {
			return nil, err
		}
		so.Retry = retry
		if so.Credentials, err = LoadCredentials(o.CredentialsFile); err != nil {
			return nil, err
		}
		return NewS3(so)
	}
	return nil, badURL("store URL %q is of no kind that is known", rawURL)
}

func badURL(format string, args ...any) *errs.Error {
	return errs.E(errs.Invalid, format, args...).
		WithHint("use file:///DIR or s3://BUCKET/PREFIX?endpoint=HOST:PORT&region=REGION")
}

// bucketPattern is Amazon's rule: https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
var (
	bucketPattern   = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$`)
	regionPattern   = regexp.MustCompile(`^[a-z0-9-]{1,40}$`)
	endpointPattern = regexp.MustCompile(`^(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?$`)
)

const maxPrefix = 256

func parseS3(u *url.URL) (S3Options, error) {
	o := S3Options{Bucket: u.Host, Prefix: strings.Trim(u.Path, "/"), Region: "us-east-1"}
	if !bucketPattern.MatchString(o.Bucket) {
		return o, badURL("%q is not the name of a bucket", o.Bucket)
	}
	if o.Prefix != "" && (len(o.Prefix) > maxPrefix || CheckName(o.Prefix) != nil) {
		return o, badURL("%.80q is not a prefix of names", o.Prefix)
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil || u.Fragment != "" {
		return o, badURL("the parameters of store URL %s cannot be read", u)
	}
	for key, values := range query {
		value := values[0]
		switch {
		case len(values) > 1:
			return o, badURL("store URL %s has %s twice", u, key)
		case key == "endpoint":
			value, o.Plain = strings.CutPrefix(value, "http://")
			value = strings.TrimSuffix(strings.TrimPrefix(value, "https://"), "/")
			if !endpointPattern.MatchString(value) {
				return o, badURL("%q is not an endpoint: [http://]HOST[:PORT]", value)
			}
			o.Endpoint = value
		case key == "region":
			if !regionPattern.MatchString(value) {
				return o, badURL("%q is not a region", value)
			}
			o.Region = value
		default:
			return o, badURL("store URL %s has the parameter %q, which is not known", u, key)
		}
	}
	if o.Endpoint == "" {
		o.Endpoint = "s3." + o.Region + ".amazonaws.com"
	}
	return o, nil
}

// Credentials open an S3 store.
type Credentials struct {
	AccessKey    string `json:"access_key"`
	SecretKey    string `json:"secret_key"`
	SessionToken string `json:"session_token,omitempty"`
}

// LoadCredentials takes them from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and
// AWS_SESSION_TOKEN, else from a JSON file that only its owner may read.
func LoadCredentials(file string) (Credentials, error) {
	c := Credentials{os.Getenv("AWS_ACCESS_KEY_ID"), os.Getenv("AWS_SECRET_ACCESS_KEY"), os.Getenv("AWS_SESSION_TOKEN")}
	if c.AccessKey != "" && c.SecretKey != "" {
		return c, nil
	}
	none := errs.E(errs.Unauthenticated, "there are no credentials for the store").
		WithHint("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write {\"access_key\": …, \"secret_key\": …} to %s (mode 0600)", file)
	if file == "" {
		return c, none.WithHint("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
	}
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return c, none
	}
	if err != nil {
		return c, fmt.Errorf("open credentials: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return c, fmt.Errorf("open credentials: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return c, errs.E(errs.Precondition, "%s has the mode %04o: others may read the credentials in it", file, info.Mode().Perm()).
			WithHint("chmod 600 %s", file)
	}
	if err := json.NewDecoder(f).Decode(&c); err != nil || c.AccessKey == "" || c.SecretKey == "" {
		return c, errs.E(errs.Invalid, "%s has no credentials in it", file).
			WithHint("write {\"access_key\": …, \"secret_key\": …} to it")
	}
	return c, nil
}
