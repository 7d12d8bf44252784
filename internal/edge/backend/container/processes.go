package container

import "github.com/harena-dev/harena/internal/sandbox"

// Processes lists the node's IDs of the processes that work in a sandbox, file workers among them.
func (b *Backend) Processes(id sandbox.ID) ([]int, error) {
	group, err := b.group(id)
	if err != nil {
		return nil, err
	}
	return group.Procs()
}
