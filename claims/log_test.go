package claims_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"regexp"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

// Everything that a session does fails at each try with another text, for nine minutes.
func TestASessionLogsEachThingThatAnOutageStopsOnce(t *testing.T) {
	for name, outage := range map[string][]error{
		"no connection": {
			&net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET}, io.ErrUnexpectedEOF, &net.OpError{Op: "write", Net: "tcp", Err: syscall.EPIPE},
			&net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}, &pgconn.PgError{Code: "57P03", Message: "the database system is starting up"},
		},
		"any other": {errors.New("no such table")}, // each attempt to begin a session has another ID
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				var calls atomic.Int32
				var log kit.SyncBuffer
				a := w.startWith("a", claims.SessionConfig{Logger: logTo(&log)})
				a.claimOne("one")
				a.fault(func(_ context.Context, call storetest.Call, _ func(context.Context) error) error {
					return fmt.Errorf("%s %v: %w", call.Op, call.Key, outage[int(calls.Add(1))%len(outage)])
				})
				ctx, cancel := context.WithTimeout(context.Background(), 9*time.Minute)
				defer cancel()
				_, err := a.keys.Claim(ctx, "two")
				require.Error(w, err)
				require.Greater(w, calls.Load(), int32(100))
				lines := make(map[string]int)
				for _, line := range regexp.MustCompile(`(?m)level=(?:WARN|ERROR) msg="([^"]+)"`).FindAllStringSubmatch(log.String(), -1) {
					lines[line[1]]++
				}
				require.Contains(w, lines, "failed to begin a session; retrying")
				for line, n := range lines {
					require.Equal(w, 1, n, "%s: %v", line, lines)
				}
			})
		})
	}
}
