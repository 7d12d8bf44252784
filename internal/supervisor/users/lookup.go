package users

import (
	"context"
	"os"

	"github.com/harena-dev/harena/internal/errs"
)

// maxFile is how large /etc/passwd and /etc/group may be.
const maxFile = 1 << 20

// Config is what a Lookup needs.
type Config struct {
	// Read returns a file's content as root inside sees it, of at most so many
	// bytes, without trust in what is inside; not-found when there is none.
	Read func(ctx context.Context, path string, most int64) ([]byte, error)
	// Root is an O_PATH descriptor of the sandbox's root directory for the fast
	// path; nil: every question is answered by Read. It must stay open.
	Root *os.File
	// DefaultUser is whom "" means; "" is root.
	DefaultUser string
}

// Lookup answers from the sandbox's /etc/passwd and /etc/group, always as they
// are now. It is a Resolver.
type Lookup struct {
	cfg  Config
	fast *fast
}

var _ Resolver = (*Lookup)(nil)

// New makes a Lookup. It reads nothing until it is asked.
func New(cfg Config) *Lookup {
	l := &Lookup{cfg: cfg}
	if cfg.Root != nil {
		l.fast = &fast{root: int(cfg.Root.Fd())}
	}
	return l
}

// Resolve implements Resolver.
func (l *Lookup) Resolve(ctx context.Context, user string) (User, error) {
	if user == "" {
		user = l.cfg.DefaultUser
	}
	if user == "" {
		user = "0"
	}
	db, err := l.database(ctx)
	if errs.Is(err, errs.Invalid) && allNumbers(user) {
		// Whoever writes nonsense into /etc inside cannot lock the operator out.
		db, err = &database{}, nil
	}
	if err != nil {
		return User{}, err
	}
	return db.find(user)
}

func (l *Lookup) database(ctx context.Context) (*database, error) {
	if l.fast != nil {
		if db := l.fast.database(ctx); db != nil {
			return db, nil
		}
	}
	passwd, err := l.read(ctx, "/etc/passwd")
	if err != nil {
		return nil, err
	}
	groups, err := l.read(ctx, "/etc/group")
	if err != nil {
		return nil, err
	}
	return parse(passwd, groups), nil
}

// read returns a file's content, nothing for one that is missing.
func (l *Lookup) read(ctx context.Context, path string) ([]byte, error) {
	b, err := l.cfg.Read(ctx, path, maxFile)
	switch errs.KindOf(err) {
	case "":
		return b, nil
	case errs.NotFound:
		return nil, nil
	case errs.Timeout, errs.Cancelled, errs.Capacity, errs.Internal:
		return nil, err
	}
	return nil, errs.E(errs.Invalid, "the sandbox's %s is of no use: %w", path, err).
		WithHint("it must be a regular file of at most 1 MiB")
}
