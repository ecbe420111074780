package claims_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// Everything that a session does fails for nine minutes, with a different text at each try.
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
				var log testkit.SyncBuffer
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

// Users of claims have asked for no lease and no job.
func TestTheLogOfASessionSpeaksOfTheSession(t *testing.T) {
	inBubble(t, func(w *world) {
		var log testkit.SyncBuffer
		cfg := claims.SessionConfig{Logger: slog.New(slog.NewJSONHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
		a, b, c := w.startWith("a", cfg), w.startWith("b", cfg), w.startWith("c", cfg)
		returned := a.work(a.claimOne("one"), 15*time.Second) // longer than it may take
		first := a.session.ID()
		a.fault(testkit.Refuse)
		time.Sleep(15 * time.Second)
		a.fault(nil)
		time.Sleep(ttl)
		a.fault(testkit.Refuse)
		time.Sleep(2 * ttl)
		require.ErrorIs(w, <-returned, tenure.ErrDeadline)
		a.fault(nil)
		time.Sleep(ttl)
		a.stop()
		b.fault(testkit.Refuse)
		b.stop()
		c.fault(testkit.Only("put", testkit.Refuse)) // so that it does not find out before its end
		key := claims.SessionKey(c.session.ID())
		record := testkit.Get(w.T, w.store, key)
		require.NoError(w, w.store.DeleteIf(w.Context(), key, tenure.IfVersion(record.Version)))
		c.stop()

		said := make(map[string]bool)
		for lines := bufio.NewScanner(strings.NewReader(log.String())); lines.Scan(); {
			line := make(map[string]any)
			require.NoError(w, json.Unmarshal(lines.Bytes(), &line))
			msg := line["msg"].(string)
			said[msg] = true
			require.NotRegexp(w, `\b(lease|job)\b`, msg)
			require.NotContains(w, line, "lease", msg)
			if strings.Contains(msg, "session") && line["replica"] != nil {
				require.Len(w, line["session"], len(first), msg)
			}
		}
		for _, msg := range []string{
			"session begun", "session renewed", "failed to renew session; retrying", "session renewed again", "session lost", "session ends",
			"funcs of the session have not returned although their contexts have ended; it is no longer renewed",
			"funcs of the session have returned", "session ended", "failed to end session; it will expire", "session lost before it was ended",
		} {
			require.Contains(w, said, msg)
		}
	})
}
