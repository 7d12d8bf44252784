package server

import (
	"context"
	"net/http"
	"strings"

	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/control/tokens"
	"github.com/harena-dev/harena/internal/errs"
)

// Verb is what a caller wants to do, for authorize.
type Verb string

// The verbs.
const (
	verbSandboxCreate Verb = "sandbox.create"
	verbSandboxRead   Verb = "sandbox.read"
	verbSandboxManage Verb = "sandbox.manage" // stop, pause, policies, lifetime
	verbExec          Verb = "sandbox.exec"
	verbFilesRead     Verb = "sandbox.files.read"
	verbFilesWrite    Verb = "sandbox.files.write"
	verbDisplay       Verb = "sandbox.display"
	verbLayerRead     Verb = "layer.read"
	verbLayerWrite    Verb = "layer.write"
	verbEventsRead    Verb = "events.read"
	verbFleetRead     Verb = "fleet.read"
	verbFleetManage   Verb = "fleet.manage"
	verbFunctionRun   Verb = "function.run"
	verbIAM           Verb = "iam"
	verbSelf          Verb = "self" // what any authenticated caller may ask about itself
)

// openPaths need no token.
var openPaths = map[string]bool{
	"/livez":  true,
	"/readyz": true,
	harenav1connect.FleetServiceVersionProcedure: true,
}

type principalKey struct{}

func principalOf(ctx context.Context) tokens.Principal {
	p, _ := ctx.Value(principalKey{}).(tokens.Principal)
	return p
}

// authenticated lets only callers with a valid token through to next, and never
// shows the token to it.
func (s *Server) authenticated(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header := r.Header.Get("Authorization")
		r.Header.Del("Authorization")
		if openPaths[r.URL.Path] {
			next.ServeHTTP(w, r)
			return
		}
		p, err := s.authenticate(header)
		if err != nil {
			w.Header().Set("WWW-Authenticate", `Bearer realm="harena"`)
			s.writeError(w, r, err)
			return
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), principalKey{}, p)))
	})
}

func (s *Server) authenticate(header string) (tokens.Principal, error) {
	if header == "" {
		return tokens.Principal{}, errs.E(errs.Unauthenticated, "the request has no token").
			WithHint("send `Authorization: Bearer TOKEN`; clients read HARENA_TOKEN or the profile that `harena up` writes")
	}
	scheme, token, ok := strings.Cut(header, " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		return tokens.Principal{}, errs.E(errs.Unauthenticated, "the Authorization header is not a bearer token").
			WithHint("send `Authorization: Bearer TOKEN`")
	}
	return s.Tokens.Verify(strings.TrimSpace(token))
}

// authorize decides whether a principal may do what verb says to resource (a
// sandbox ID, a layer name, an edge; empty when the call names none). Every call
// passes here exactly once before anything else happens.
func authorize(_ context.Context, p tokens.Principal, verb Verb, resource string) error {
	if verb == verbSelf && p.TokenID != "" || p.Role == tokens.RoleAdmin {
		return nil
	}
	e := errs.E(errs.Denied, "role %q may not do %s", p.Role, verb).WithHint("use a token with a role that may")
	if resource != "" {
		e = e.On("%s", resource)
	}
	return e
}

// verbs says what each procedure needs. A procedure that is missing here is refused.
var verbs = map[string]Verb{
	harenav1connect.SandboxServiceCreateProcedure:      verbSandboxCreate,
	harenav1connect.SandboxServiceBatchCreateProcedure: verbSandboxCreate,
	harenav1connect.SandboxServiceForkProcedure:        verbSandboxCreate,
	harenav1connect.SandboxServiceGetProcedure:         verbSandboxRead,
	harenav1connect.SandboxServiceListProcedure:        verbSandboxRead,
	harenav1connect.SandboxServiceWatchProcedure:       verbSandboxRead,
	harenav1connect.SandboxServiceStopProcedure:        verbSandboxManage,
	harenav1connect.SandboxServicePauseProcedure:       verbSandboxManage,
	harenav1connect.SandboxServiceResumeProcedure:      verbSandboxManage,
	harenav1connect.SandboxServiceSnapshotProcedure:    verbSandboxManage,
	harenav1connect.SandboxServiceVerifyProcedure:      verbSandboxManage,
	harenav1connect.SandboxServiceSetNetworkProcedure:  verbSandboxManage,
	harenav1connect.SandboxServiceSetGuardProcedure:    verbSandboxManage,
	harenav1connect.SandboxServiceSetLifetimeProcedure: verbSandboxManage,

	harenav1connect.ExecServiceRunProcedure:           verbExec,
	harenav1connect.ExecServiceStartProcedure:         verbExec,
	harenav1connect.ExecServiceConnectProcedure:       verbExec,
	harenav1connect.ExecServiceSendInputProcedure:     verbExec,
	harenav1connect.ExecServiceResizeProcedure:        verbExec,
	harenav1connect.ExecServiceSignalProcedure:        verbExec,
	harenav1connect.ExecServiceListCommandsProcedure:  verbExec,
	harenav1connect.ExecServiceCreateSessionProcedure: verbExec,
	harenav1connect.ExecServiceListSessionsProcedure:  verbExec,
	harenav1connect.ExecServiceCloseSessionProcedure:  verbExec,
	harenav1connect.ExecServiceLogProcedure:           verbExec,

	harenav1connect.FileServiceReadProcedure:    verbFilesRead,
	harenav1connect.FileServiceStatProcedure:    verbFilesRead,
	harenav1connect.FileServiceListProcedure:    verbFilesRead,
	harenav1connect.FileServiceWatchProcedure:   verbFilesRead,
	harenav1connect.FileServiceWriteProcedure:   verbFilesWrite,
	harenav1connect.FileServiceMoveProcedure:    verbFilesWrite,
	harenav1connect.FileServiceRemoveProcedure:  verbFilesWrite,
	harenav1connect.FileServiceMakeDirProcedure: verbFilesWrite,

	harenav1connect.DisplayServiceScreenshotProcedure: verbDisplay,
	harenav1connect.DisplayServiceInputProcedure:      verbDisplay,
	harenav1connect.FunctionServiceRunProcedure:       verbFunctionRun,

	harenav1connect.LayerServiceListProcedure:           verbLayerRead,
	harenav1connect.LayerServiceGetProcedure:            verbLayerRead,
	harenav1connect.LayerServiceVerifyProcedure:         verbLayerRead,
	harenav1connect.LayerServiceImportProcedure:         verbLayerWrite,
	harenav1connect.LayerServiceTagProcedure:            verbLayerWrite,
	harenav1connect.LayerServiceRemoveProcedure:         verbLayerWrite,
	harenav1connect.LayerServiceCollectGarbageProcedure: verbLayerWrite,

	harenav1connect.LayerServiceCollectGarbageProgressProcedure: verbLayerWrite,
	harenav1connect.LayerServiceReachProcedure:                  verbLayerRead,
	harenav1connect.LayerServicePushProcedure:                   verbLayerWrite,

	harenav1connect.EventServiceListProcedure:   verbEventsRead,
	harenav1connect.EventServiceFollowProcedure: verbEventsRead,
	harenav1connect.EventServiceVerifyProcedure: verbEventsRead,

	harenav1connect.JobServiceListJobsProcedure: verbSandboxRead,
	harenav1connect.JobServiceLeaseJobProcedure: verbSandboxManage,

	harenav1connect.FleetServiceListEdgesProcedure: verbFleetRead,
	harenav1connect.FleetServiceDoctorProcedure:    verbFleetRead,
	harenav1connect.FleetServiceDrainProcedure:     verbFleetManage,
	harenav1connect.FleetServiceUndrainProcedure:   verbFleetManage,

	harenav1connect.IAMServiceWhoAmIProcedure:          verbSelf,
	harenav1connect.IAMServiceCreateProjectProcedure:   verbIAM,
	harenav1connect.IAMServiceListProjectsProcedure:    verbIAM,
	harenav1connect.IAMServiceGetProjectProcedure:      verbIAM,
	harenav1connect.IAMServiceRemoveProjectProcedure:   verbIAM,
	harenav1connect.IAMServiceCreatePrincipalProcedure: verbIAM,
	harenav1connect.IAMServiceListPrincipalsProcedure:  verbIAM,
	harenav1connect.IAMServiceRemovePrincipalProcedure: verbIAM,
	harenav1connect.IAMServiceSetPolicyProcedure:       verbIAM,
	harenav1connect.IAMServiceListPoliciesProcedure:    verbIAM,
	harenav1connect.IAMServiceRemovePolicyProcedure:    verbIAM,
	harenav1connect.IAMServiceSetQuotaProcedure:        verbIAM,
	harenav1connect.IAMServiceGetQuotaProcedure:        verbIAM,
	harenav1connect.IAMServiceCreateTokenProcedure:     verbIAM,
	harenav1connect.IAMServiceListTokensProcedure:      verbIAM,
	harenav1connect.IAMServiceRemoveTokenProcedure:     verbIAM,
}
