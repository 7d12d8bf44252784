package server

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"sync"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	edgev1 "github.com/harena-dev/harena/api/harena/edge/v1"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

const maxBatch = 10_000

// BatchCreate creates items with bounded concurrency and sends each as it ends.
// When the caller goes away no further item is begun; those that exist stay.
func (h *sandboxService) BatchCreate(ctx context.Context, r *connect.Request[harenav1.BatchCreateRequest], out *connect.ServerStream[harenav1.BatchCreateResponse]) error {
	spec, err := sandbox.Normalize(r.Msg.GetSpec())
	if err != nil {
		return err
	}
	count := int(r.Msg.GetCount())
	switch {
	case count < 1:
		return errs.E(errs.Invalid, "a count of %d is not valid", count).WithHint("use 1 to %d", maxBatch)
	case count > maxBatch:
		return errs.OverLimit(errs.Invalid, "sandboxes of one batch", maxBatch, count)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// A stop of the job that comes later ends also the items that have not been begun by then.
	asked := timestamppb.Now()
	project := projectOr(ctx, r.Msg.GetProject())
	indexes := make(chan int)
	done := make(chan *harenav1.BatchCreateResponse)
	go func() {
		defer close(indexes)
		for i := range count {
			select {
			case indexes <- i:
			case <-ctx.Done():
				return
			}
		}
	}()
	var wg sync.WaitGroup
	for range min(count, h.s.BatchConcurrency) {
		wg.Go(func() {
			for i := range indexes {
				done <- h.batchItem(ctx, i, &edgev1.CreateRequest{
					RequestId: itemRequestID(r.Msg.GetRequestId(), i), Project: project, Spec: proto.Clone(spec).(*harenav1.SandboxSpec),
					Asked: asked,
				})
			}
		})
	}
	go func() {
		wg.Wait()
		close(done)
	}()
	var failure error
	for item := range done {
		if failure == nil {
			if failure = out.Send(item); failure != nil {
				cancel()
			}
		}
	}
	if failure == nil {
		failure = ctx.Err()
	}
	return failure
}

func (h *sandboxService) batchItem(ctx context.Context, index int, req *edgev1.CreateRequest) *harenav1.BatchCreateResponse {
	item := &harenav1.BatchCreateResponse{Index: int32(index)} //nolint:gosec // below maxBatch
	res, err := h.create(ctx, req)
	if err != nil {
		item.Error, item.ErrorMessage = errs.Detail(errs.FromConnect(err))
		return item
	}
	item.Sandbox = res.GetSandbox()
	return item
}

// itemRequestID gives each item of a batch a request ID of its own, so that a
// repeated batch finds every item again.
func itemRequestID(batch string, index int) string {
	if batch == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(batch))
	return fmt.Sprintf("batch-%s-%d", hex.EncodeToString(sum[:16]), index)
}
