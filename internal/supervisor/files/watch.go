package files

import (
	"context"
	"encoding/binary"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// maxWatches bounds the watches of a sandbox at a time; each has a worker.
const maxWatches = 8

// Watch implements FileServiceHandler.
func (s *Service) Watch(ctx context.Context, req *connect.Request[harenav1.WatchFilesRequest], out *connect.ServerStream[harenav1.WatchFilesResponse]) error {
	m := req.Msg
	sub, err := s.subject(ctx, m.GetSandboxId(), m.GetUser(), m.GetPath(), m.GetPathBytes())
	if err == nil {
		err = s.watch(ctx, sub, m.GetRecursive(), out.Send)
	}
	if err != nil {
		return s.refuse(err)
	}
	return nil
}

// watch sends events until ctx ends, what is watched is removed, or send fails. A client that does not read holds the worker up;
// what the kernel then cannot queue is told as an overflow.
func (s *Service) watch(ctx context.Context, sub subject, recursive bool, send func(*harenav1.WatchFilesResponse) error) error {
	c, err := s.begin(ctx, sub.id, class{slots: s.watches}, opWatch, sub.path, &harenav1.WatchFilesRequest{PathBytes: []byte(sub.path), Recursive: recursive})
	if err != nil {
		return err
	}
	defer c.release() // which ends a worker that still watches
	for {
		t, payload, err := c.get()
		switch {
		case err != nil:
			if c.failed {
				c.idle()
			}
			return err
		case t == frameEnd:
			c.idle()
			return nil
		case t != framePart:
			return c.malformed()
		}
		for len(payload) > 0 {
			n, k := binary.Uvarint(payload)
			if k <= 0 || n > uint64(len(payload)-k) {
				return c.malformed()
			}
			e := &harenav1.WatchFilesResponse{}
			if proto.Unmarshal(payload[k:k+int(n)], e) != nil {
				return c.malformed()
			}
			payload = payload[k+int(n):]
			if err := send(e); err != nil {
				return err
			}
		}
	}
}
