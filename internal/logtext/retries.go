package logtext

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

const (
	// again is how long a class of errors is not logged again.
	again = 10 * time.Minute

	mostClasses = 32 // that are remembered
)

// Retries logs the errors of an operation that is retried. It logs an error when the class of errors
// changes, but each class at most every ten minutes; other errors it logs at debug level. The zero value
// is ready for use. All methods are safe for concurrent use.
type Retries struct {
	Repeat bool // logs an unchanged class every ten minutes, too

	mu   sync.Mutex
	told map[string]time.Time
	last string
}

// Log logs an error at a level, or at debug level if its class was logged recently.
func (r *Retries) Log(logger *slog.Logger, level slog.Level, msg string, err error, attrs ...any) {
	if !r.IsNew(fmt.Sprint(msg, attrs, Class(err))) {
		level = slog.LevelDebug
	}
	logger.Log(context.Background(), level, msg, append(attrs, "error", OneLine(err))...)
}

// IsNew reports whether an error of a class should be logged, and records that it was.
func (r *Retries) IsNew(class string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	at, told := r.told[class]
	same := told && class == r.last && !r.Repeat
	r.last = class
	if same || told && now.Sub(at) < again {
		return false
	}
	if r.told == nil || len(r.told) >= mostClasses {
		r.told = make(map[string]time.Time)
	}
	r.told[class] = now
	return true
}

// Reset makes the next error new, after a success.
func (r *Retries) Reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.told = nil
}

// Class returns the class of an error. While a database restarts or a balancer resets connections, each
// attempt may fail in a different way: these errors are one class. The class of any other error is its
// SQLSTATE, or its text without digits.
func Class(err error) string {
	if err = Sound(err); err == nil {
		return ""
	}
	var answer interface{ SQLState() string } // of any driver
	if errors.As(err, &answer) && answer.SQLState() != "" {
		if code := answer.SQLState(); !isOutage(code) {
			return code
		}
		return unreachable
	}
	if errors.As(err, new(*pgconn.ConnectError)) || errors.As(err, new(*net.OpError)) || errors.As(err, new(*net.DNSError)) || pgconn.SafeToRetry(err) {
		return unreachable
	}
	for _, lost := range lostConnection {
		if errors.Is(err, lost) {
			return unreachable
		}
	}
	return Gist(err.Error())
}

const unreachable = "unreachable"

var lostConnection = []error{io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, context.DeadlineExceeded, os.ErrDeadlineExceeded,
	syscall.ECONNRESET, syscall.ECONNREFUSED, syscall.EPIPE}

// isOutage reports whether this SQLSTATE means that the server serves no client, because it shuts down, starts
// up or has no free slot, or that the connection is gone.
func isOutage(code string) bool {
	return strings.HasPrefix(code, "08") || strings.HasPrefix(code, "53") || strings.HasPrefix(code, "57P")
}
