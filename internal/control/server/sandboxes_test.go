package server_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/control/server"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

func (n *node) sandboxes(t *testing.T) harenav1connect.SandboxServiceClient {
	return harenav1connect.NewSandboxServiceClient(n.client(t), n.url)
}

func create(image, request string) *connect.Request[harenav1.CreateRequest] {
	return connect.NewRequest(&harenav1.CreateRequest{RequestId: request, Spec: &harenav1.SandboxSpec{Image: image}, Explain: true})
}

func TestCreate(t *testing.T) {
	n := newNode(t, "edgeaa", "edgebb")
	c := n.sandboxes(t)
	res, err := c.Create(within(t), create("debian:12", "r1"))
	if err != nil {
		t.Fatal(err)
	}
	sb := res.Msg.GetSandbox()
	if _, err := sandbox.ParseID(sb.GetId()); err != nil || sb.GetProject() != "default" || sb.GetSpec().GetLimits().GetPids() != sandbox.DefaultPids {
		t.Errorf("%v, %v", sb, err)
	}
	if x := res.Msg.GetExplanation(); len(x) != 2 || !strings.HasPrefix(x[0], "placement: edge "+sb.GetId()[:6]) {
		t.Errorf("%q", x)
	}
	// The same request reaches the same edge.
	for range 5 {
		again, err := c.Create(within(t), create("debian:12", "r1"))
		if err != nil || again.Msg.GetSandbox().GetId()[:6] != sb.GetId()[:6] {
			t.Errorf("%v, %v", again, err)
		}
	}
	// An edge that is full is followed by the other one, and both by its error.
	first, other := n.edges[0], n.edges[1]
	if string(other.id) == sb.GetId()[:6] {
		first, other = other, first
	}
	first.full.Store(true)
	res, err = c.Create(within(t), create("debian:12", "r1"))
	if err != nil || res.Msg.GetSandbox().GetId()[:6] != string(other.id) || !strings.Contains(strings.Join(res.Msg.GetExplanation(), "\n"), "refused") {
		t.Errorf("%v, %v", res, err)
	}
	other.full.Store(true)
	_, err = c.Create(within(t), create("debian:12", "r1"))
	if e := kindOf(t, err, errs.Capacity, "try later"); e.Limit == nil {
		t.Errorf("%#v", e)
	}
	for name, req := range map[string]*connect.Request[harenav1.CreateRequest]{
		"no image": create("", ""), "request ID": create("x", "\x01"), "long request ID": create("x", strings.Repeat("x", 129)),
	} {
		if _, err := c.Create(within(t), req); !errs.Is(errs.FromConnect(err), errs.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestNoEdge(t *testing.T) {
	n := newNode(t)
	_, err := n.sandboxes(t).Create(within(t), create("x", ""))
	kindOf(t, err, errs.Capacity, "fleet ls")
}

func TestUnreachableEdge(t *testing.T) {
	n := newNode(t, "edgeaa")
	id := n.edges[0].sandboxID("1")
	n.edges[0].stop()
	_, err := n.sandboxes(t).Get(within(t), connect.NewRequest(&harenav1.GetRequest{Id: id}))
	kindOf(t, err, errs.Capacity, "try again")
	fleet := harenav1connect.NewFleetServiceClient(n.client(t), n.url)
	res, err := fleet.ListEdges(within(t), connect.NewRequest(&harenav1.ListEdgesRequest{}))
	if err != nil || res.Msg.GetEdges()[0].GetState() != "unreachable" {
		t.Errorf("%v, %v", res, err)
	}
}

func TestBatchCreate(t *testing.T) {
	n := newNode(t, "edgeaa")
	f := n.edges[0]
	f.slow = 5 * time.Millisecond
	c := n.sandboxes(t)
	batch := func(ctx context.Context, image string, count int32) (items []*harenav1.BatchCreateResponse, err error) {
		s, err := c.BatchCreate(ctx, connect.NewRequest(&harenav1.BatchCreateRequest{RequestId: "b", Spec: &harenav1.SandboxSpec{Image: image}, Count: count}))
		if err != nil {
			return nil, err
		}
		for s.Receive() {
			items = append(items, s.Msg())
		}
		return items, s.Err()
	}
	items, err := batch(within(t), "x", 60)
	indexes, ids := map[int32]bool{}, map[string]bool{}
	for _, i := range items {
		indexes[i.GetIndex()], ids[i.GetSandbox().GetId()] = true, true
	}
	if err != nil || len(indexes) != 60 {
		t.Errorf("%d items, %v", len(indexes), err)
	}
	if most := f.most.Load(); most > 16 {
		t.Errorf("%d creations at once", most)
	}
	requests := map[string]bool{}
	for _, r := range f.requests {
		requests[r.GetRequestId()] = true
	}
	if len(requests) != 60 {
		t.Errorf("%d request IDs of 60", len(requests))
	}
	items, err = batch(within(t), "missing", 3)
	if err != nil || len(items) != 3 || items[0].GetError().GetKind() != "not-found" || items[0].GetErrorMessage() == "" {
		t.Errorf("%v, %v", items, err)
	}
	for _, count := range []int32{0, -1, 10_001} {
		if _, err := batch(within(t), "x", count); !errs.Is(errs.FromConnect(err), errs.Invalid) {
			t.Errorf("%d: %v", count, err)
		}
	}
	// A caller that goes away ends it.
	f.slow = time.Minute
	ctx, cancel := context.WithTimeout(within(t), 100*time.Millisecond)
	defer cancel()
	_, _ = batch(ctx, "x", 1000)
	for f.creating.Load() != 0 {
		time.Sleep(5 * time.Millisecond)
	}
}

func TestGroupOperations(t *testing.T) {
	n := newNode(t, "edgeaa", "edgebb")
	a, b := n.edges[0], n.edges[1]
	c := n.sandboxes(t)
	stop := func(sel *harenav1.Selector) ([]*harenav1.Outcome, error) {
		res, err := c.Stop(within(t), connect.NewRequest(&harenav1.StopRequest{Selector: sel}))
		if err != nil {
			return nil, err
		}
		return res.Msg.GetOutcomes(), nil
	}
	ids := []string{b.sandboxID("1"), a.sandboxID("1"), "zzzzzzaaaaaaaaaaaaaa", "bad", a.sandboxID("2"), a.sandboxID("1")}
	out, err := stop(&harenav1.Selector{Ids: ids})
	if err != nil || len(out) != 5 {
		t.Fatalf("%v, %v", out, err)
	}
	for i, want := range []string{"", "", "not-found", "invalid", ""} {
		if out[i].GetSandboxId() != ids[i] || out[i].GetError().GetKind() != want {
			t.Errorf("%d: %v", i, out[i])
		}
	}
	if len(a.stops) != 1 || len(a.stops[0].GetSelector().GetIds()) != 2 || len(b.stops) != 1 {
		t.Errorf("calls: %v, %v", a.stops, b.stops)
	}
	out, err = stop(&harenav1.Selector{Job: "j"})
	if err != nil || len(out) != 2 || out[0].GetSandboxId() > out[1].GetSandboxId() {
		t.Errorf("%v, %v", out, err)
	}
	for name, sel := range map[string]*harenav1.Selector{
		"nothing": {}, "none": nil, "both": {Ids: ids, Job: "j"}, "labels": {Labels: map[string]string{"a b": ""}}, "too many": {Ids: make([]string, 10_001)},
	} {
		if _, err := stop(sel); !errs.Is(errs.FromConnect(err), errs.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// What the edges do not have is unsupported, with a reason.
	_, err = c.Pause(within(t), connect.NewRequest(&harenav1.PauseRequest{Selector: &harenav1.Selector{Job: "j"}}))
	kindOf(t, err, errs.Unsupported, "not built yet")
	// One edge is gone: its sandboxes fail by ID, a job fails as a whole.
	b.stop()
	out, err = stop(&harenav1.Selector{Ids: []string{a.sandboxID("1"), b.sandboxID("1")}})
	if err != nil || out[0].GetError() != nil || out[1].GetError().GetKind() != "capacity" {
		t.Errorf("%v, %v", out, err)
	}
	_, err = stop(&harenav1.Selector{Job: "j"})
	kindOf(t, err, errs.Capacity, "try again")
}

func TestListSpansEdges(t *testing.T) {
	n := newNode(t, "edgeaa", "edgebb")
	c := n.sandboxes(t)
	for _, size := range []int32{1, 2, 3, 4, 6, 0} {
		var all []string
		page := &harenav1.Page{Size: size}
		for pages := 0; ; pages++ {
			res, err := c.List(within(t), connect.NewRequest(&harenav1.ListRequest{Page: page}))
			if err != nil || pages > 10 {
				t.Fatalf("size %d, page %d: %v", size, pages, err)
			}
			if got := len(res.Msg.GetSandboxes()); size > 0 && got > int(size) {
				t.Errorf("%d on a page of %d", got, size)
			}
			for _, sb := range res.Msg.GetSandboxes() {
				all = append(all, sb.GetId())
			}
			if res.Msg.GetNextPageToken() == "" {
				break
			}
			page = &harenav1.Page{Size: size, Token: res.Msg.GetNextPageToken()}
		}
		if len(all) != 6 || all[0] != n.edges[0].sandboxID("1") || all[5] != n.edges[1].sandboxID("3") {
			t.Errorf("size %d: %v", size, all)
		}
	}
	for _, page := range []*harenav1.Page{{Size: -1}, {Size: 10_001}, {Token: "x"}} {
		if _, err := c.List(within(t), connect.NewRequest(&harenav1.ListRequest{Page: page})); !errs.Is(errs.FromConnect(err), errs.Invalid) {
			t.Errorf("%v: %v", page, err)
		}
	}
}

func TestWatchMergesEdges(t *testing.T) {
	n := newNode(t, "edgeaa", "edgebb")
	ctx, cancel := context.WithCancel(within(t))
	s, err := n.sandboxes(t).Watch(ctx, connect.NewRequest(&harenav1.WatchRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	seen, synced := map[string]bool{}, 0
	for synced == 0 && s.Receive() {
		if s.Msg().GetSynced() {
			synced++
			continue
		}
		seen[s.Msg().GetSandbox().GetId()] = true
	}
	if len(seen) != 2 || synced != 1 {
		t.Errorf("%v before synced, %v", seen, s.Err())
	}
	cancel()
	wait(t, "the end at one edge", n.edges[0].cancelled)
	wait(t, "the end at the other", n.edges[1].cancelled)
}

func TestLayersHaveOneHome(t *testing.T) {
	get := func(n *node) (*connect.Response[harenav1.GetLayerResponse], error) {
		return harenav1connect.NewLayerServiceClient(n.client(t), n.url).Get(within(t), connect.NewRequest(&harenav1.GetLayerRequest{Name: "x"}))
	}
	res, err := get(newNode(t, "edgeaa"))
	if err != nil || res.Msg.GetLayer().GetNames()[0] != "default/x" {
		t.Errorf("%v, %v", res, err)
	}
	_, err = get(newNode(t, "edgeaa", "edgebb"))
	kindOf(t, err, errs.Unsupported, "fleet ls")
}

func TestSpreadMovesOnlyWhatItMust(t *testing.T) {
	edges := []sandbox.EdgeID{"edgeaa", "edgebb", "edgecc", "edgedd"}
	count := map[sandbox.EdgeID]int{}
	for i := range 400 {
		seed := string(rune('a'+i%26)) + strings.Repeat("x", i/26)
		ranked := server.Spread(nil, edges, seed)
		count[ranked[0]]++
		fewer := server.Spread(nil, edges[:3], seed)
		if ranked[0] != "edgedd" && fewer[0] != ranked[0] {
			t.Errorf("%q moved from %s to %s when another edge left", seed, ranked[0], fewer[0])
		}
	}
	for _, e := range edges {
		if count[e] < 50 {
			t.Errorf("%s got %d of 400", e, count[e])
		}
	}
}
