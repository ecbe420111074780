// Package listen receives Postgres notifications for a whole store on one connection, and
// reconnects when the connection breaks.
package listen

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/wake"
)

const (
	patience  = 5 * time.Second  // limit of anything that should take milliseconds
	heartbeat = 30 * time.Second // interval of pings on a silent connection, so that no firewall forgets it

	// Pauses before the next connection: after errors, and if nothing is delivered. A pooler will not
	// deliver soon, but a server that was merely slow will.
	firstPause         = 100 * time.Millisecond
	longestPause       = 10 * time.Second
	firstUndelivered   = 10 * time.Second
	longestUndelivered = 10 * time.Minute
)

// errUndelivered means that the connection accepts LISTEN and receives nothing.
var errUndelivered = errors.New("a notification was sent and did not arrive")

// Listener passes the notifications of one channel on to a hub.
type Listener struct {
	Channel string
	Hub     *wake.Hub[string]
	Logger  *slog.Logger

	// Connect opens the connection to listen on.
	Connect func(ctx context.Context) (*pgx.Conn, error)

	// Key returns the hub's key for a payload, and whether the payload is for this hub.
	Key func(payload string) (key string, ours bool)

	// Notify notifies the channel, through another connection.
	Notify func(ctx context.Context, payload string) error

	closing sync.WaitGroup // for connections that pgx has yet to close
}

// Run listens until ctx is done. Then it closes its connections, and waits a few seconds for that if the
// server does not answer. It may be called once.
func (l *Listener) Run(ctx context.Context) {
	defer l.closing.Wait()
	pause, undelivered, failed := firstPause, firstUndelivered, false
	var retries logtext.Retries
	for {
		lasted, err := l.listen(ctx, failed)
		l.Hub.SetLive(false)
		if ctx.Err() != nil {
			return
		}
		if lasted > patience {
			pause, undelivered = firstPause, firstUndelivered
			retries.Reset()
		}
		failed = true
		retries.Log(l.Logger, slog.LevelWarn, "standbys are not woken, and poll", err, "channel", l.Channel)
		wait := pause
		pause = min(2*pause, longestPause)
		if errors.Is(err, errUndelivered) {
			wait, undelivered = undelivered, min(2*undelivered, longestUndelivered)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait - rand.N(wait/4)):
		}
	}
}

// listen uses one connection until it breaks. It returns how long the connection was live, and the
// error that ended it.
func (l *Listener) listen(ctx context.Context, again bool) (lasted time.Duration, err error) {
	conn, err := l.prepare(ctx)
	if err != nil {
		return 0, err
	}
	defer l.close(conn)
	l.Hub.SetLive(true)
	level := slog.LevelDebug
	if again {
		level = slog.LevelInfo
	}
	l.Logger.Log(ctx, level, "standbys are woken by notifications", "channel", l.Channel)
	began := time.Now()
	err = l.receive(ctx, conn)
	return time.Since(began), err
}

func (l *Listener) receive(ctx context.Context, conn *pgx.Conn) error {
	for {
		received, err := await(ctx, conn, heartbeat)
		switch {
		case err == nil:
			if key, ours := l.Key(received.Payload); ours {
				l.Hub.Wake(key)
			}
		case ctx.Err() != nil:
			return err
		case pgconn.Timeout(err):
			if err := within(ctx, conn.Ping); err != nil {
				return err
			}
		default:
			return err
		}
	}
}

// prepare opens a connection on which notifications arrive.
func (l *Listener) prepare(ctx context.Context) (*pgx.Conn, error) {
	var conn *pgx.Conn
	err := within(ctx, func(ctx context.Context) (err error) {
		conn, err = l.Connect(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	err = within(ctx, func(ctx context.Context) error {
		listen := "LISTEN " + pgx.Identifier{l.Channel}.Sanitize()
		if _, err := conn.Exec(ctx, listen); err != nil {
			return err
		}
		if err := l.checkDelivery(ctx, conn); err != nil {
			return err
		}
		// This session is meant to idle. No other client shares it: through a pooler nothing would
		// have arrived. LISTEN is repeated because pg_stat_activity shows the last query.
		_, err := conn.Exec(ctx, listen+"; SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'idle_session_timeout' AND setting <> '0'")
		return err
	})
	if err != nil {
		l.close(conn)
		return nil, err
	}
	return conn, nil
}

// checkDelivery makes sure that notifications from another connection arrive on this one. Through a
// pooler in transaction mode LISTEN succeeds, and nothing ever arrives.
func (l *Listener) checkDelivery(ctx context.Context, conn *pgx.Conn) error {
	word := uuid.NewString()
	if err := l.Notify(ctx, word); err != nil {
		return err
	}
	for began := time.Now(); ; {
		received, err := await(ctx, conn, patience/2-time.Since(began))
		switch {
		case err == nil && received.Payload == word:
			return nil
		case err == nil: // not lost: the hub wakes all watches when it becomes live
		case ctx.Err() == nil && pgconn.Timeout(err):
			return fmt.Errorf("%w: if a pooler is in between, set ListenURL, or the store's whole URL, to the server itself; if ListenURL is set, it may name another database", errUndelivered)
		default:
			return err
		}
	}
}

// close ends the connection. UNLISTEN is for poolers, which pass the server's connection on to other
// clients: it would continue to collect notifications that no client receives.
func (l *Listener) close(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if !conn.IsClosed() {
		_, _ = conn.Exec(ctx, "UNLISTEN *")
	}
	_ = conn.Close(ctx)
	// After a call that broke off, pgx closes the connection in the background, which may
	// take seconds. The next connection need not wait for that.
	l.closing.Go(func() { <-conn.PgConn().CleanupDone() })
}

// await returns the next notification, or a [pgconn.Timeout] if none arrives in time; the connection stays
// usable.
func await(ctx context.Context, conn *pgx.Conn, longest time.Duration) (*pgconn.Notification, error) {
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	return conn.WaitForNotification(ctx)
}

func within(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return do(ctx)
}
