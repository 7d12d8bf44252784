package exec

import (
	"context"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

// Log implements ExecService.
func (s *Service) Log(context.Context, *connect.Request[harenav1.LogRequest], *connect.ServerStream[harenav1.LogResponse]) error {
	return errs.ToConnect(errs.E(errs.Unsupported, "this sandbox keeps no operation log"))
}
