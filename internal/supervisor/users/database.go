package users

import (
	"bytes"
	"slices"
	"strconv"
	"strings"

	"github.com/harena-dev/harena/internal/errs"
)

const (
	// maxID is the last ID of a sandbox: it owns 65,536.
	maxID = 65535
	// maxGroups is what a command can be given. More groups give more rights only,
	// so the rest is left out.
	maxGroups = 64
	maxField  = 4095

	defaultHome  = "/"
	defaultShell = "/bin/sh"
)

// database is what a sandbox says of its users. Its text is hostile: whoever is
// root inside writes it. Entries that make no sense are left out, as by libc.
type database struct {
	accounts []User // Groups is nil
	groups   []group
}

type group struct {
	name    string
	gid     uint32
	members []string
}

// parse reads the texts of passwd(5) and group(5).
func parse(passwd, groups []byte) *database {
	db := &database{}
	for fields := range entries(passwd, 7) {
		uid, ok1 := parseID(fields[2])
		gid, ok2 := parseID(fields[3])
		if !ok1 || !ok2 {
			continue
		}
		u := User{Name: fields[0], UID: uid, GID: gid, Home: fields[5], Shell: fields[6]}
		if !strings.HasPrefix(u.Home, "/") {
			u.Home = defaultHome
		}
		if !strings.HasPrefix(u.Shell, "/") {
			u.Shell = defaultShell
		}
		db.accounts = append(db.accounts, u)
	}
	for fields := range entries(groups, 4) {
		gid, ok := parseID(fields[2])
		if !ok {
			continue
		}
		db.groups = append(db.groups, group{name: fields[0], gid: gid, members: strings.Split(fields[3], ",")})
	}
	return db
}

// entries yields the lines that have a name and n fields; fields that are
// missing at the end are empty.
func entries(text []byte, n int) func(yield func([]string) bool) {
	return func(yield func([]string) bool) {
		for line := range bytes.Lines(text) {
			line = bytes.TrimSpace(line)
			if len(line) == 0 || line[0] == '#' || bytes.IndexByte(line, 0) >= 0 {
				continue
			}
			fields := strings.SplitN(string(line), ":", n)
			for len(fields) < n {
				fields = append(fields, "")
			}
			// Group members may be many, the other fields are short.
			last := slices.ContainsFunc(fields[:n-1], func(f string) bool { return len(f) > maxField })
			if fields[0] == "" || last {
				continue
			}
			if !yield(fields) {
				return
			}
		}
	}
}

// parseID reads a number as an ID that a sandbox can have.
func parseID(s string) (uint32, bool) {
	id, err := strconv.ParseUint(s, 10, 32)
	return uint32(id), err == nil && id <= maxID
}

// find resolves "name", "uid", "name:group" or "uid:gid" as Docker does.
func (db *database) find(spec string) (User, error) {
	who, grp, hasGroup := strings.Cut(spec, ":")
	if who == "" || hasGroup && grp == "" {
		return User{}, errs.E(errs.Invalid, "user %.80q is not valid", spec).WithHint("use name, uid, name:group or uid:gid")
	}
	u, err := db.account(who)
	if err != nil {
		return User{}, err
	}
	if hasGroup {
		// As with Docker, a group that is named is the only one.
		u.GID, err = db.group(grp)
		return u, err
	}
	u.Groups = db.memberships(u)
	return u, nil
}

// account finds a user by name, or by ID if it is a number.
func (db *database) account(who string) (User, error) {
	uid, numeric, err := number(who)
	if err != nil {
		return User{}, err
	}
	for _, u := range db.accounts {
		if numeric && u.UID == uid || !numeric && u.Name == who {
			return u, nil
		}
	}
	if numeric || who == "root" {
		// Root exists even where no file says so.
		return User{UID: uid, Home: defaultHome, Shell: defaultShell}, nil
	}
	return User{}, errs.E(errs.Invalid, "user %.80q does not exist in the sandbox", who).
		WithHint("use a name from the sandbox's /etc/passwd, or a numeric ID")
}

func (db *database) group(grp string) (uint32, error) {
	gid, numeric, err := number(grp)
	if err != nil || numeric {
		return gid, err
	}
	for _, g := range db.groups {
		if g.name == grp {
			return g.gid, nil
		}
	}
	return 0, errs.E(errs.Invalid, "group %.80q does not exist in the sandbox", grp).
		WithHint("use a name from the sandbox's /etc/group, or a numeric ID")
}

// memberships lists the groups that have u as a member.
func (db *database) memberships(u User) []uint32 {
	if u.Name == "" {
		return nil
	}
	var gids []uint32
	for _, g := range db.groups {
		if len(gids) == maxGroups {
			break
		}
		if g.gid != u.GID && slices.Contains(g.members, u.Name) && !slices.Contains(gids, g.gid) {
			gids = append(gids, g.gid)
		}
	}
	return gids
}

// allNumbers reports whether spec is "uid:gid".
func allNumbers(spec string) bool {
	who, grp, ok := strings.Cut(spec, ":")
	return ok && who != "" && grp != "" && strings.Trim(who+grp, "0123456789") == ""
}

// number reads digits as an ID; false when s is a name.
func number(s string) (id uint32, numeric bool, err error) {
	if strings.Trim(s, "0123456789") != "" {
		return 0, false, nil
	}
	id, ok := parseID(s)
	if !ok {
		return 0, true, errs.OverLimit(errs.Invalid, "user and group IDs", maxID, s)
	}
	return id, true, nil
}
