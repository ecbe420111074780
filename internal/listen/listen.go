// Package listen hears Postgres notifications, on one connection for all who
// wait, and connects again when that breaks.
package listen

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/tenurelib/tenure/internal/wake"
)

const (
	patience  = 5 * time.Second  // with what should take milliseconds
	heartbeat = 30 * time.Second // a silent connection is asked whether it lives, before what forwards it forgets it
	leastRest = 100 * time.Millisecond
	mostRest  = 10 * time.Second
	deafRest  = 10 * time.Second // at first; a pooler stays one, a server that is slow doesn't
	mostDeaf  = 10 * time.Minute
)

// errDeaf says that the connection takes a LISTEN and hears nothing.
var errDeaf = errors.New("a notification was sent and not heard")

// Listener passes the notifications of one channel on to a hub.
type Listener struct {
	Channel string
	Hub     *wake.Hub[string]
	Logger  *slog.Logger

	// Connect opens the connection to listen on.
	Connect func(ctx context.Context) (*pgx.Conn, error)

	// Key returns the hub's key that a payload means; false: it is not for this hub.
	Key func(payload string) (key string, ours bool)

	// Notify notifies the channel, through another connection.
	Notify func(ctx context.Context, payload string) error

	closing sync.WaitGroup // for connections that pgx has yet to close
}

// Run listens until ctx is done. Then it closes its connections, and waits some
// seconds for a server that does not answer. It may be called once.
func (l *Listener) Run(ctx context.Context) {
	defer l.closing.Wait()
	rest, deaf, said := leastRest, deafRest, ""
	for {
		heardFor, err := l.listen(ctx, said != "")
		l.Hub.SetLive(false)
		if ctx.Err() != nil {
			return
		}
		if heardFor > patience {
			rest, deaf, said = leastRest, deafRest, "" // it went well for a while
		}
		if text := Gist(err.Error()); text != said {
			said = text
			l.Logger.Warn("standbys are not woken, and poll", "channel", l.Channel, "error", err)
		}
		pause := rest
		if errors.Is(err, errDeaf) {
			pause, deaf = deaf, min(2*deaf, mostDeaf)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause - rand.N(pause/4)):
		}
		rest = min(2*rest, mostRest)
	}
}

// listen is one connection's life. It returns for how long it heard, and why no
// longer.
func (l *Listener) listen(ctx context.Context, again bool) (heardFor time.Duration, err error) {
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
	err = l.hear(ctx, conn)
	return time.Since(began), err
}

func (l *Listener) hear(ctx context.Context, conn *pgx.Conn) error {
	for {
		heard, err := wait(ctx, conn, heartbeat)
		switch {
		case err == nil:
			if key, ours := l.Key(heard.Payload); ours {
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

// prepare connects, and returns a connection that hears.
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
		if err := l.hearItself(ctx, conn); err != nil {
			return err
		}
		// This session is meant to idle. It is our own, not one that a pooler shares with
		// other clients, or nothing would have been heard. LISTEN stands in front again
		// because pg_stat_activity shows the last query.
		_, err := conn.Exec(ctx, listen+"; SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'idle_session_timeout' AND setting <> '0'")
		return err
	})
	if err != nil {
		l.close(conn)
		return nil, err
	}
	return conn, nil
}

// hearItself makes sure that what is sent through another connection is heard on
// this one. Through a pooler in transaction mode LISTEN succeeds, and nothing is
// ever heard.
func (l *Listener) hearItself(ctx context.Context, conn *pgx.Conn) error {
	word := uuid.NewString()
	if err := l.Notify(ctx, word); err != nil {
		return err
	}
	for began := time.Now(); ; {
		heard, err := wait(ctx, conn, patience/2-time.Since(began))
		switch {
		case err == nil && heard.Payload == word:
			return nil
		case err == nil: // the hub wakes everybody when it becomes live
		case ctx.Err() == nil && pgconn.Timeout(err):
			return fmt.Errorf("%w: a pooler may be in the way, or another database meant", errDeaf)
		default:
			return err
		}
	}
}

// close ends the connection. Behind a pooler that is more than hanging up: the
// server's connection goes on to others, and would collect what nobody hears.
func (l *Listener) close(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if !conn.IsClosed() {
		_, _ = conn.Exec(ctx, "UNLISTEN *")
	}
	_ = conn.Close(ctx)
	// After a call that broke off, pgx closes it in the background and gives itself
	// seconds for that, for which the next connection need not wait.
	l.closing.Go(func() { <-conn.PgConn().CleanupDone() })
}

// wait returns the next notification, or an error that is a [pgconn.Timeout]
// where none comes for so long; the connection stays usable.
func wait(ctx context.Context, conn *pgx.Conn, longest time.Duration) (*pgconn.Notification, error) {
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	return conn.WaitForNotification(ctx)
}

func within(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return do(ctx)
}

// Gist is an error's text without its numbers. A port that differs each time does
// not make an error a new one.
func Gist(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsDigit(r) {
			return -1
		}
		return r
	}, text)
}
