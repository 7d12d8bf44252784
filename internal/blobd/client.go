package blobd

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/harena-dev/harena/internal/errs"
)

// protocol is the version of the control socket. A daemon that speaks another one is replaced.
const protocol = 1

// callTime bounds a call whose caller's context has no earlier end. None waits for the store.
const callTime = 30 * time.Second

// control speaks to whatever daemon listens on the socket of a data directory.
type control struct {
	socket string
	http   *http.Client
}

func newControl(socket string) *control {
	dial := func(context.Context, string, string) (net.Conn, error) {
		return dialAt("unix", socket)
	}
	return &control{socket: socket, http: &http.Client{Transport: &http.Transport{DialContext: dial, MaxIdleConnsPerHost: 4}}}
}

func (c *control) close() { c.http.CloseIdleConnections() }

type helloAnswer struct {
	Protocol int    `json:"protocol"`
	Version  string `json:"version"`
	Pid      int    `json:"pid"`
	Settings string `json:"settings"`
}

type attachRequest struct {
	Layer string   `json:"layer"`
	Blobs []Object `json:"blobs"`
}

type attachAnswer struct {
	Paths []Path `json:"paths"`
}

type detachRequest struct {
	Layer string `json:"layer"`
}

// failure is how errors cross the socket.
type failure struct {
	Kind    errs.Kind `json:"kind"`
	Message string    `json:"message"`
	Hint    string    `json:"hint,omitempty"`
}

// call sends in as JSON and decodes the answer into out; either may be nil. A daemon that is not there is errNoDaemon.
func (c *control) call(ctx context.Context, path string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	body, err := c.do(ctx, path, in)
	if err != nil {
		return err
	}
	defer body.Close()
	if out == nil {
		return nil
	}
	const most = 64 << 20
	if err := json.NewDecoder(io.LimitReader(body, most)).Decode(out); err != nil {
		return unreachable(ctx, err)
	}
	return nil
}

var errNoDaemon = errors.New("blobd does not answer")

func unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return errs.E(errs.KindOf(ctx.Err()), "ask blobd: %w", ctx.Err())
	}
	e := errs.E(errs.Capacity, "blobd does not answer: %v", err).WithHint("it is being started again; look at DIR/blobd/log")
	e.Err = errNoDaemon
	return e
}

func (c *control) do(ctx context.Context, path string, in any) (io.ReadCloser, error) {
	b, err := json.Marshal(in)
	if err != nil {
		return nil, fmt.Errorf("encode request: %w", err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://blobd"+path, bytes.NewReader(b))
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	res, err := c.http.Do(req)
	if err != nil {
		return nil, unreachable(ctx, err)
	}
	if res.StatusCode == http.StatusOK {
		return res.Body, nil
	}
	defer res.Body.Close()
	var f failure
	if err := json.NewDecoder(io.LimitReader(res.Body, 1<<16)).Decode(&f); err != nil || f.Kind == "" {
		return nil, errs.E(errs.Internal, "blobd answers %s", res.Status)
	}
	return nil, errs.E(f.Kind, "%s", f.Message).WithHint("%s", f.Hint)
}

func (c *control) hello(ctx context.Context) (helloAnswer, error) {
	ctx, cancel := context.WithTimeout(ctx, leaveTime)
	defer cancel()
	var h helloAnswer
	err := c.call(ctx, "/hello", nil, &h)
	return h, err
}

// events calls fn for each event until ctx or the daemon ends. Those that the daemon had before the call come first.
func (c *control) events(ctx context.Context, fn func(Event)) error {
	body, err := c.do(ctx, "/events", nil)
	if err != nil {
		return err
	}
	defer body.Close()
	lines := bufio.NewScanner(body)
	for lines.Scan() {
		var e Event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return errs.E(errs.Internal, "blobd sent an event that is not understood: %w", err)
		}
		if e.Kind != "" { // else a sign of life
			fn(e)
		}
	}
	return unreachable(ctx, errors.Join(lines.Err(), io.EOF))
}

// Client speaks to the daemon of a node and keeps one running. Methods may be called concurrently. While a daemon is being
// replaced, they wait for its successor, up to the deadline of their context or 30 s.
type Client struct {
	control *control
	keeper  *keeper
}

// Attach makes blobs readable for a layer, and says where, in their order. The paths stay good until Detach, also when the
// daemon or the node is started anew. Attaching a layer again gives what is best now, and ends that it is degraded.
// It does not ask the store for anything. Invalid: a digest or size is wrong, or a blob has another size than before.
func (c *Client) Attach(ctx context.Context, layer string, blobs []Object) ([]Path, error) {
	if err := checkAttach(layer, blobs); err != nil {
		return nil, err
	}
	var a attachAnswer
	if err := c.retry(ctx, "/attach", attachRequest{layer, blobs}, &a); err != nil {
		return nil, err
	}
	if len(a.Paths) != len(blobs) {
		return nil, errs.E(errs.Internal, "blobd answers %d paths for %d blobs", len(a.Paths), len(blobs))
	}
	return a.Paths, nil
}

// Detach ends what Attach began: nothing that was mounted from it is used any more. Unknown layers are no error.
func (c *Client) Detach(ctx context.Context, layer string) error {
	return c.retry(ctx, "/detach", detachRequest{layer}, nil)
}

// Status reports what the daemon is doing.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var s Status
	err := c.retry(ctx, "/status", nil, &s)
	return s, err
}

// retryEvery spaces attempts to reach a daemon that is being started.
const retryEvery = 20 * time.Millisecond

func (c *Client) retry(ctx context.Context, path string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	for {
		err := c.control.call(ctx, path, in, out)
		if !errors.Is(err, errNoDaemon) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(retryEvery):
		}
	}
}
