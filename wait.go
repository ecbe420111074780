package tenure

import (
	"context"
	"time"

	"github.com/tenurelib/tenure/internal/pace"
)

func sleep(ctx context.Context, d time.Duration) bool { return pace.Sleep(ctx, d) }

func jitter(d time.Duration) time.Duration { return pace.Jitter(d) }
