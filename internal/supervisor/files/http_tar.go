package files

import (
	"context"
	"io"
	"net/http"
	"time"

	"google.golang.org/protobuf/proto"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

func (s *Service) getTar(w http.ResponseWriter, r *http.Request, sub subject) error {
	c, err := s.begin(r.Context(), sub.id, s.download(), opTarOut, sub.path, &harenav1.StatRequest{PathBytes: []byte(sub.path)})
	if err != nil {
		return err
	}
	defer c.release()
	c.pr.widen()
	t, payload, err := c.get()
	if err == nil && t != frameReady {
		err = c.malformed()
	}
	if err == nil {
		// What fails at once is still told in full.
		t, payload, err = c.get()
	}
	if err != nil {
		if c.failed {
			c.idle()
		}
		return err
	}
	w.Header().Set("Content-Type", "application/x-tar")
	control := http.NewResponseController(w)
	defer func() { _ = control.SetWriteDeadline(time.Time{}) }()
	for {
		switch {
		case err == nil && t == frameEnd:
			c.idle()
			return nil
		case err == nil && t == frameData:
			// As with files: deadlines where the server has them.
			_ = control.SetWriteDeadline(time.Now().Add(stallAfter))
			_, err = w.Write(payload)
		case err == nil:
			err = c.malformed()
		}
		if err != nil {
			s.cfg.Log.Warn("tar download ended early", "path", show(sub.path), "error", err)
			panic(http.ErrAbortHandler)
		}
		t, payload, err = c.get()
	}
}

func (s *Service) putTar(w http.ResponseWriter, r *http.Request, sub subject) error {
	return s.putContent(w, r, &harenav1.LogFile{Operation: opKindUnpack, Path: []byte(sub.path)}, func(ctx context.Context, body io.Reader) (*harenav1.FileInfo, error) {
		return s.transferIn(ctx, s.upload(), sub, opTarIn, &harenav1.StatRequest{PathBytes: []byte(sub.path)}, body)
	})
}

// transferIn runs an operation that takes content.
func (s *Service) transferIn(ctx context.Context, cl class, sub subject, o op, m proto.Message, source io.Reader) (*harenav1.FileInfo, error) {
	c, err := s.begin(ctx, sub.id, cl, o, sub.path, m)
	if err != nil {
		return nil, err
	}
	defer c.release()
	c.pr.widen()
	if _, err := c.expect(frameReady); err != nil {
		if c.failed && c.put(frameAbort, nil) == nil {
			c.idle()
		}
		return nil, err
	}
	return c.upload(source)
}
