// Package users finds a sandbox's own users, from its own files.
package users

import "context"

// User is whom a command or a file operation runs as; IDs are those inside.
type User struct {
	Name   string
	UID    uint32
	GID    uint32
	Groups []uint32 // supplementary, without GID
	Home   string   // "/" when the sandbox does not say
	Shell  string   // "/bin/sh" when the sandbox does not say
}

// Resolver finds users.
type Resolver interface {
	// Resolve finds "name", "uid", "name:group" or "uid:gid" as Docker does: a
	// numeric ID need not exist, a name must. Empty means the sandbox's default
	// user. Errors: invalid (no such user or group, malformed), timeout.
	Resolve(ctx context.Context, user string) (User, error)
}
